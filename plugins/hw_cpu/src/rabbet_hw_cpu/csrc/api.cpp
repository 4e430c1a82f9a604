// The C interface. Chooses the widest compiled variant that the processor has.
#include "kernels.h"
#include "pool.h"

namespace {

#if defined(__x86_64__) && defined(RABBET_HAS_X86)
rabbet::Variant choose() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return rabbet::avx512::variant();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return rabbet::avx2::variant();
    return rabbet::generic::variant();
}
#else
rabbet::Variant choose() { return rabbet::generic::variant(); }
#endif

const rabbet::Variant& kernels() {
    static const rabbet::Variant variant = choose();
    return variant;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int rabbet_abi() { return 1; }
int rabbet_has_amx() { return rabbet::amx::available(); }
void rabbet_start(int num_threads, const int* cores) { rabbet::pool_start(num_threads, cores); }

void rabbet_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t size, int64_t stride, float eps, int type) {
    kernels().rms_norm(x, weight, out, rows, size, stride, eps, type);
}
void rabbet_add_rms_norm(void* x, void* residual, const void* weight, int64_t rows, int64_t size, float eps, int type) {
    kernels().add_rms_norm(x, residual, weight, rows, size, eps, type);
}
void rabbet_rotary(void* q, void* k, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t q_heads, int64_t k_heads,
                   int64_t dim, int64_t rotated, int64_t q_stride, int64_t k_stride, int neox, int type) {
    kernels().rotary(q, positions, cos_sin, rows, q_heads, dim, rotated, q_stride, neox, type);
    kernels().rotary(k, positions, cos_sin, rows, k_heads, dim, rotated, k_stride, neox, type);
}
void rabbet_gated(const void* x, void* out, int64_t rows, int64_t size, int activation, int type) {
    kernels().gated(x, out, rows, size, activation, type);
}
void rabbet_attention(const rabbet::AttentionArgs* args, int type, int packed) {
    if (packed) rabbet::amx::attention(*args);
    else kernels().attention(*args, type);
}
int64_t rabbet_packed_bytes(int64_t outputs, int64_t inputs) { return rabbet::amx::packed_bytes(outputs, inputs); }
void rabbet_pack(const void* weight, void* packed, int64_t outputs, int64_t inputs) {
    rabbet::amx::pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed), outputs, inputs);
}
void rabbet_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t inputs, int64_t outputs, int gated) {
    rabbet::amx::linear(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(packed), static_cast<const uint16_t*>(bias),
                        static_cast<uint16_t*>(out), rows, inputs, outputs, gated);
}

}  // extern "C"
#pragma GCC visibility pop

// The C interface. Chooses the widest compiled variant that the processor has.
#include "kernels.h"
#include "pool.h"

namespace {

// The variants, the plainest first; how many of them this processor runs.
const rabbet::Variant& variant(int level) {
#if defined(__x86_64__) && defined(RABBET_HAS_X86)
    static const rabbet::Variant all[] = {rabbet::generic::variant(), rabbet::avx2::variant(), rabbet::avx512::variant()};
#else
    static const rabbet::Variant all[] = {rabbet::generic::variant()};
#endif
    return all[level];
}

int levels() {
#if defined(__x86_64__) && defined(RABBET_HAS_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? 3 : 2;
#else
    return 1;
#endif
}

int& chosen() {
    static int level = levels() - 1;
    return level;
}

const rabbet::Variant& kernels() { return variant(chosen()); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int rabbet_abi() { return 4; }
// Takes a plainer variant than the widest, for tests; -1 takes the widest. Returns how many there are.
int rabbet_select(int level) {
    chosen() = level < 0 || level >= levels() ? levels() - 1 : level;
    return levels();
}
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
// With `tiles` in the order of the AMX kernel, which takes bfloat16 alone.
int64_t rabbet_packed_bytes(int64_t outputs, int64_t inputs, int type, int tiles) {
    if (tiles) return rabbet::amx::packed_bytes(outputs, inputs);
    return (outputs + 15) / 16 * 16 * inputs * (type == 0 ? 4 : 2);
}
void rabbet_pack(const void* weight, void* packed, int64_t outputs, int64_t inputs, int type, int tiles) {
    if (tiles) rabbet::amx::pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed), outputs, inputs);
    else kernels().pack(weight, packed, outputs, inputs, type);
}
void rabbet_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t inputs, int64_t outputs,
                   int gated, int type, int tiles) {
    const rabbet::LinearArgs args{x, packed, bias, out, rows, inputs, outputs, gated};
    if (tiles) rabbet::amx::linear(args);
    else kernels().linear(args, type);
}

// One call of the functions above as data; the order of the operations is that of graphs.py. `a` holds the arguments that are
// not floating point, in their order.
struct RabbetCall {
    int64_t operation;
    int64_t a[13];
    double f;
};

void rabbet_replay(const RabbetCall* calls, int64_t count) {
    for (const RabbetCall* c = calls; c != calls + count; ++c) {
        const int64_t* a = c->a;
        const auto p = [a](int i) { return reinterpret_cast<void*>(a[i]); };
        const auto n = [a](int i) { return static_cast<int>(a[i]); };
        const auto positions = [&p](int i) { return static_cast<const int64_t*>(p(i)); };
        const float eps = static_cast<float>(c->f);
        switch (c->operation) {
            case 0: rabbet_rms_norm(p(0), p(1), p(2), a[3], a[4], a[5], eps, n(6)); break;
            case 1: rabbet_add_rms_norm(p(0), p(1), p(2), a[3], a[4], eps, n(5)); break;
            case 2:
                rabbet_rotary(p(0), p(1), positions(2), static_cast<const float*>(p(3)), a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                              n(11), n(12));
                break;
            case 3: rabbet_gated(p(0), p(1), a[2], a[3], n(4), n(5)); break;
            case 4: rabbet_attention(static_cast<const rabbet::AttentionArgs*>(p(0)), n(1), n(2)); break;
            case 5: rabbet_linear(p(0), p(1), p(2), p(3), a[4], a[5], a[6], n(7), n(8), n(9)); break;
        }
    }
}

}  // extern "C"
#pragma GCC visibility pop

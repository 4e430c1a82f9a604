// What each compiled variant offers. Types: 0 is float32, 1 is bfloat16.
#pragma once
#include <cstdint>

namespace rabbet {

struct AttentionArgs {
    const void* q;  // [T, H, D], token stride q_stride elements
    const void* k;  // [T, K, D]
    const void* v;
    void* cache;  // [blocks, 2, K, S, D] with slots and dims in the order of the kernel
    void* out;    // [T, H, D], contiguous
    const float* sinks;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_table;
    const int64_t* slots;
    int64_t q_stride, k_stride, v_stride, num_requests, num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    int64_t max_blocks, window;  // window 0: none
    float scale, soft_cap;       // soft_cap 0: none
};

struct LinearArgs {
    const void *x, *packed, *bias;  // [rows, inputs]; packed by the same variant; [outputs] or null
    void* out;                      // [rows, outputs], or half of them with gating
    int64_t rows, inputs, outputs;
    int gated;  // out = silu(first half) * second half, and no bias
};

struct Variant {
    void (*rms_norm)(const void* x, const void* weight, void* out, int64_t rows, int64_t size, int64_t stride, float eps, int type);
    void (*add_rms_norm)(void* x, void* residual, const void* weight, int64_t rows, int64_t size, float eps, int type);
    void (*rotary)(void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads, int64_t dim,
                   int64_t rotated, int64_t stride, int neox, int type);
    void (*gated)(const void* x, void* out, int64_t rows, int64_t size, int activation, int type);
    void (*attention)(const AttentionArgs& args, int type);
    void (*linear)(const LinearArgs& args, int type);
    void (*pack)(const void* weight, void* packed, int64_t outputs, int64_t inputs, int type);
};


#define RABBET_DECLARE(name)                                                                          \
    namespace name {                                                                                  \
    Variant variant();                                                                                \
    void attention(const AttentionArgs& args, int type);                                              \
    void linear(const LinearArgs& args, int type);                                                    \
    void pack(const void* weight, void* packed, int64_t outputs, int64_t inputs, int type);           \
    }
RABBET_DECLARE(generic)
RABBET_DECLARE(avx2)
RABBET_DECLARE(avx512)
#undef RABBET_DECLARE

namespace amx {
bool available();
int64_t packed_bytes(int64_t outputs, int64_t inputs);
void pack(const uint16_t* weight, uint16_t* packed, int64_t outputs, int64_t inputs);
void linear(const LinearArgs& args);
void attention(const AttentionArgs& args);
}  // namespace amx

}  // namespace rabbet

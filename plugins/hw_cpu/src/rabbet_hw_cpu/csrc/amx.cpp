// bfloat16 kernels on AMX tiles: dense linear layers and paged attention. Sapphire Rapids and newer.
//
// A tile holds 16 rows of 64 bytes. TDPBF16PS: C[16][16] f32 += A[16][32] bf16 * B[32][16] bf16, where B lies in pairs of
// k: row k/2 holds (b[k][n], b[k+1][n]) for each n. Weights, keys and values are kept in that form, so that no kernel
// shuffles anything while it multiplies.
#include "kernels.h"
#include "pool.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace rabbet {
namespace amx {
namespace {

constexpr int kTile = 16;          // rows of a tile, columns of C
constexpr int kDepth = 32;         // k of one TDPBF16PS
constexpr int kTileElements = kTile * kDepth;

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

struct FullTiles : TileConfig {
    FullTiles() {
        for (int i = 0; i < 8; ++i) columns[i] = 64, rows[i] = 16;
    }
};

// Done at the start of every task and never remembered: other libraries use the tiles of the calling thread too, and
// leave them in a shape of their own or released.
void configure() {
    static const FullTiles config;
    _tile_loadconfig(&config);
}

inline __m512 to_float(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// e^x with a relative error below 3e-7; x below -87 gives 0.
inline __m512 exp512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
    const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x));
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), y, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, whole);
}

// ---- linear: weights packed as [O/16][I/32] tiles of 16 pair rows x 16 outputs

// Stores rows of a C tile as bfloat16, with a bias.
inline void store_rows(const float* c, uint16_t* out, int64_t stride, int64_t rows, int64_t columns, const uint16_t* bias) {
    const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
    __m512 add = _mm512_setzero_ps();
    if (bias) add = to_float(_mm256_maskz_loadu_epi16(mask, bias));
    for (int64_t r = 0; r < rows; ++r) {
        const __m512 value = _mm512_add_ps(_mm512_load_ps(c + r * kTile), add);
        _mm256_mask_storeu_epi16(out + r * stride, mask, to_bf16(value));
    }
}

inline void store_gated(const float* gate, const float* up, uint16_t* out, int64_t stride, int64_t rows, int64_t columns) {
    const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
    for (int64_t r = 0; r < rows; ++r) {
        const __m512 g = _mm512_load_ps(gate + r * kTile), u = _mm512_load_ps(up + r * kTile);
        const __m512 sigmoid = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), exp512(_mm512_sub_ps(_mm512_setzero_ps(), g))));
        _mm256_mask_storeu_epi16(out + r * stride, mask, to_bf16(_mm512_mul_ps(_mm512_mul_ps(g, sigmoid), u)));
    }
}

// Up to 32 rows times two column blocks; C tiles 0..3 end in c[4][256].
inline void product(const uint16_t* a0, const uint16_t* a1, int64_t a_stride, const uint16_t* b0, const uint16_t* b1,
                    int64_t steps, bool two_rows, float* c) {
    _tile_zero(0);
    _tile_zero(1);
    if (two_rows) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < steps; ++k) {
            _tile_loadd(4, a0 + k * kDepth, a_stride * 2);
            _tile_loadd(6, b0 + k * kTileElements, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + k * kTileElements, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + k * kDepth, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c + 512, 64);
        _tile_stored(3, c + 768, 64);
    } else {
        for (int64_t k = 0; k < steps; ++k) {
            _tile_loadd(4, a0 + k * kDepth, a_stride * 2);
            _tile_loadd(6, b0 + k * kTileElements, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + k * kTileElements, 64);
            _tile_dpbf16ps(1, 4, 7);
            // The weights stream from memory: ask for them a few tiles ahead.
            for (int line = 0; line < 16; ++line) {
                _mm_prefetch(reinterpret_cast<const char*>(b0 + (k + 6) * kTileElements) + line * 64, _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(b1 + (k + 6) * kTileElements) + line * 64, _MM_HINT_T0);
            }
        }
    }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
}

}  // namespace

bool available() {
    constexpr int kRequest = 0x1023, kTileData = 18;
    static const bool ok = __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return ok;
}

// Column blocks are handled in pairs, so their number is even; prefetching may look past the end.
int64_t packed_bytes(int64_t outputs, int64_t inputs) {
    const int64_t blocks = (outputs + 2 * kTile - 1) / (2 * kTile) * 2;
    return blocks * (inputs / kDepth) * kTileElements * 2;
}

void pack(const uint16_t* weight, uint16_t* packed, int64_t outputs, int64_t inputs) {
    const int64_t steps = inputs / kDepth;
    const int64_t blocks = (outputs + 2 * kTile - 1) / (2 * kTile) * 2;
    parallel_for(blocks, [&](int64_t block, int) {
        uint16_t* target = packed + block * steps * kTileElements;
        for (int64_t k = 0; k < steps; ++k)
            for (int64_t pair = 0; pair < kTile; ++pair)
                for (int64_t n = 0; n < kTile; ++n)
                    for (int64_t i = 0; i < 2; ++i) {
                        const int64_t row = block * kTile + n;
                        *target++ = row < outputs ? weight[row * inputs + k * kDepth + 2 * pair + i] : 0;
                    }
    });
}

void linear(const uint16_t* x, const uint16_t* packed, const uint16_t* bias, uint16_t* out, int64_t rows, int64_t inputs,
            int64_t outputs, int gated) {
    const int64_t steps = inputs / kDepth, width = gated ? outputs / 2 : outputs;
    // A task is a chunk of rows times a run of pairs of column blocks. With gating a pair is a gate block and its up block.
    const int64_t pairs = gated ? (width + kTile - 1) / kTile : (outputs + 2 * kTile - 1) / (2 * kTile);
    constexpr int64_t kChunk = 256;
    const int64_t chunks = (rows + kChunk - 1) / kChunk;
    const int64_t threads = pool_size();
    const int64_t run = std::max<int64_t>(1, std::min<int64_t>(rows > 64 ? 4 : 32, pairs / (threads * 4)));
    const int64_t runs = (pairs + run - 1) / run;
    parallel_for(chunks * runs, [&](int64_t task, int) {
        configure();
        alignas(64) float c[4 * 256];
        thread_local std::vector<uint16_t> tail;
        const int64_t first_row = task / runs * kChunk, last_row = std::min(rows, first_row + kChunk);
        const int64_t last_pair = std::min(pairs, (task % runs + 1) * run);
        for (int64_t pair = task % runs * run; pair < last_pair; ++pair) {
            const int64_t left = gated ? pair : 2 * pair, right = gated ? pair + width / kTile : 2 * pair + 1;
            const uint16_t* b0 = packed + left * steps * kTileElements;
            const uint16_t* b1 = packed + right * steps * kTileElements;
            for (int64_t row = first_row; row < last_row; row += 2 * kTile) {
                const int64_t count = std::min<int64_t>(2 * kTile, last_row - row);
                const uint16_t* a = x + row * inputs;
                int64_t stride = inputs;
                if (count < 2 * kTile && count != kTile) {
                    // Tiles always read 16 rows; the last ones are copied so that nothing past the input is touched.
                    const int64_t padded = count > kTile ? 2 * kTile : kTile;
                    if (static_cast<int64_t>(tail.size()) < padded * inputs) tail.resize(padded * inputs);
                    std::memcpy(tail.data(), a, count * inputs * 2);
                    std::memset(tail.data() + count * inputs, 0, (padded - count) * inputs * 2);
                    a = tail.data();
                }
                product(a, a + kTile * stride, stride, b0, b1, steps, count > kTile, c);
                for (int64_t half = 0; half * kTile < count; ++half) {
                    const int64_t here = std::min<int64_t>(kTile, count - half * kTile);
                    uint16_t* target = out + (row + half * kTile) * width;
                    const float* tiles = c + half * 512;
                    if (gated) {
                        store_gated(tiles, tiles + 256, target + pair * kTile, width, here, std::min<int64_t>(kTile, width - pair * kTile));
                        continue;
                    }
                    for (int64_t side = 0; side < 2; ++side) {
                        const int64_t column = (2 * pair + side) * kTile;
                        if (column >= outputs) break;
                        store_rows(tiles + side * 256, target + column, width, here, std::min<int64_t>(kTile, outputs - column),
                                   bias ? bias + column : nullptr);
                    }
                }
            }
        }
    });
}

// ---- attention. A page of one head: keys as [S/16][D/32] tiles (pairs of dims x 16 slots), values as [S/32][D/16] tiles
// (pairs of slots x 16 dims). A block has a multiple of 32 slots.

namespace {

inline int64_t key_index(int64_t slot, int64_t dim, int64_t head_dim) {
    return (slot / 16) * 16 * head_dim + (dim / 2) * 32 + (slot % 16) * 2 + dim % 2;
}
inline int64_t value_index(int64_t slot, int64_t dim, int64_t head_dim) {
    return (slot / 32) * 32 * head_dim + (dim / 16) * 512 + (slot % 32) / 2 * 32 + (dim % 16) * 2 + slot % 2;
}

void store(const AttentionArgs& a) {
    const int64_t dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
    const int64_t step = std::max<int64_t>(8, a.num_tokens / (4 * pool_size()));
    parallel_for((a.num_tokens + step - 1) / step, [&](int64_t task, int) {
        for (int64_t token = task * step; token < std::min(a.num_tokens, (task + 1) * step); ++token) {
            const int64_t slot = a.slots[token];
            if (slot < 0) continue;
            const int64_t offset = slot % a.block_size;
            for (int64_t head = 0; head < a.num_kv_heads; ++head) {
                uint16_t* page = static_cast<uint16_t*>(a.cache) + slot / a.block_size * 2 * half + head * head_page;
                const uint16_t* k = static_cast<const uint16_t*>(a.k) + token * a.k_stride + head * dim;
                const uint16_t* v = static_cast<const uint16_t*>(a.v) + token * a.v_stride + head * dim;
                for (int64_t i = 0; i < dim; i += 2) std::memcpy(page + key_index(offset, i, dim), k + i, 4);
                for (int64_t i = 0; i < dim; ++i) page[half + value_index(offset, i, dim)] = v[i];
            }
        }
    });
}

struct Scratch {
    std::vector<uint16_t> memory;
    // Aligned parts: queries [16][D], weights [16][32], values of a partial step [32 x D], scores [16][32], output [16][D].
    uint16_t* q;
    uint16_t* p;
    uint16_t* v;
    float* s;
    float* o;

    void reserve(int64_t dim) {
        const size_t bytes = 32 * dim + 1024 + 64 * dim + 2048 + 64 * dim + 64;
        if (memory.size() * 2 < bytes) memory.resize((bytes + 1) / 2);
        auto start = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63};
        q = reinterpret_cast<uint16_t*>(start), start += 32 * dim;
        p = reinterpret_cast<uint16_t*>(start), start += 1024;
        v = reinterpret_cast<uint16_t*>(start), start += 64 * dim;
        s = reinterpret_cast<float*>(start), start += 2048;
        o = reinterpret_cast<float*>(start);
    }
};

struct Rows {
    int64_t request, kv_head, first, count, group, context;  // rows first .. first + count - 1 of (query token, head of the group)
};

// 16 rows of queries against all their keys, 32 keys at a time, with a running maximum (arXiv 2205.14135).
void attend(const AttentionArgs& a, const Rows& rows, Scratch& w) {
    const int64_t dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
    const int64_t start = a.query_start[rows.request];
    const int32_t* table = a.block_table + rows.request * a.max_blocks;
    alignas(64) float peak[16], total[16];
    int64_t position[16];
    for (int64_t r = 0; r < 16; ++r) {
        const int64_t row = rows.first + std::min(r, rows.count - 1), token = row / rows.group;
        const int64_t head = rows.kv_head * rows.group + row % rows.group;
        position[r] = rows.context + token;
        std::memcpy(w.q + r * dim, static_cast<const uint16_t*>(a.q) + (start + token) * a.q_stride + head * dim, dim * 2);
        peak[r] = a.sinks ? a.sinks[head] : -INFINITY;
        total[r] = a.sinks ? 1.0f : 0.0f;
    }
    std::memset(w.o, 0, 64 * dim);
    const int64_t last = position[rows.count - 1];
    const int64_t lowest = a.window > 0 ? std::max<int64_t>(0, position[0] - a.window + 1) : 0;
    for (int64_t key = lowest / 32 * 32; key <= last; key += 32) {
        const uint16_t* page = static_cast<const uint16_t*>(a.cache) + static_cast<int64_t>(table[key / a.block_size]) * 2 * half + rows.kv_head * head_page;
        const uint16_t* keys = page + key % a.block_size * dim;
        const uint16_t* values = page + half + key % a.block_size * dim;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < dim / 32; ++k) {
            _tile_loadd(4, w.q + k * 32, dim * 2);
            _tile_loadd(5, keys + k * 512, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, keys + 16 * dim + k * 512, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, w.s, 128);
        _tile_stored(1, w.s + 16, 128);
        const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 never = _mm512_set1_ps(-INFINITY);
        for (int64_t r = 0; r < rows.count; ++r) {
            __m512 s0 = _mm512_mul_ps(_mm512_load_ps(w.s + r * 32), _mm512_set1_ps(a.scale));
            __m512 s1 = _mm512_mul_ps(_mm512_load_ps(w.s + r * 32 + 16), _mm512_set1_ps(a.scale));
            if (a.soft_cap > 0) {
                // cap * tanh(s / cap), as 1 - 2 / (e^(2x) + 1)
                auto cap = [&](__m512 s) {
                    const __m512 e = exp512(_mm512_min_ps(_mm512_mul_ps(s, _mm512_set1_ps(2.0f / a.soft_cap)), _mm512_set1_ps(80.0f)));
                    return _mm512_mul_ps(_mm512_set1_ps(a.soft_cap), _mm512_sub_ps(_mm512_set1_ps(1.0f), _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, _mm512_set1_ps(1.0f)))));
                };
                s0 = cap(s0), s1 = cap(s1);
            }
            // Keys above the row's position, below its window, or past the context hold anything: they are taken out here.
            const int32_t high = static_cast<int32_t>(position[r] - key);
            const int32_t low = a.window > 0 ? static_cast<int32_t>(std::max<int64_t>(position[r] - a.window + 1 - key, 0)) : 0;
            const __m512i next = _mm512_add_epi32(index, _mm512_set1_epi32(16));
            const __mmask16 m0 = _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(high)) & _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(low));
            const __mmask16 m1 = _mm512_cmple_epi32_mask(next, _mm512_set1_epi32(high)) & _mm512_cmpge_epi32_mask(next, _mm512_set1_epi32(low));
            s0 = _mm512_mask_mov_ps(never, m0, s0);
            s1 = _mm512_mask_mov_ps(never, m1, s1);
            const float top = std::max(peak[r], _mm512_reduce_max_ps(_mm512_max_ps(s0, s1)));
            if (top == -INFINITY) {
                // Nothing of this step is seen by the row.
                _mm512_store_si512(w.p + r * 32, _mm512_setzero_si512());
                continue;
            }
            const float shrink = std::exp(peak[r] - top);
            const __m512 e0 = _mm512_maskz_mov_ps(m0, exp512(_mm512_sub_ps(s0, _mm512_set1_ps(top))));
            const __m512 e1 = _mm512_maskz_mov_ps(m1, exp512(_mm512_sub_ps(s1, _mm512_set1_ps(top))));
            total[r] = total[r] * shrink + _mm512_reduce_add_ps(_mm512_add_ps(e0, e1));
            peak[r] = top;
            _mm512_store_si512(w.p + r * 32, (__m512i)_mm512_cvtne2ps_pbh(e1, e0));
            if (shrink != 1.0f)
                for (int64_t i = 0; i < dim; i += 16)
                    _mm512_store_ps(w.o + r * dim + i, _mm512_mul_ps(_mm512_load_ps(w.o + r * dim + i), _mm512_set1_ps(shrink)));
        }
        for (int64_t r = rows.count; r < 16; ++r) _mm512_store_si512(w.p + r * 32, _mm512_setzero_si512());
        const int64_t valid = last + 1 - key;
        if (valid < 32) {
            // Slots past the context may hold NaN, and 0 * NaN is NaN: a clean copy stands in for the last step.
            std::memset(w.v, 0, 64 * dim);
            for (int64_t d = 0; d < dim / 16; ++d)
                for (int64_t pair = 0; pair < (valid + 1) / 2; ++pair) {
                    const __mmask32 kept = 2 * pair + 1 < valid ? 0xFFFFFFFFu : 0x55555555u;
                    const int64_t at = d * 512 + pair * 32;
                    _mm512_store_si512(w.v + at, _mm512_maskz_loadu_epi16(kept, values + at));
                }
            values = w.v;
        }
        _tile_loadd(4, w.p, 64);
        for (int64_t d = 0; d < dim / 16; ++d) {
            _tile_loadd(0, w.o + d * 16, dim * 4);
            _tile_loadd(5, values + d * 512, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_stored(0, w.o + d * 16, dim * 4);
        }
    }
    for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t row = rows.first + r, token = start + row / rows.group, head = rows.kv_head * rows.group + row % rows.group;
        uint16_t* target = static_cast<uint16_t*>(a.out) + (token * a.num_heads + head) * dim;
        const __m512 factor = _mm512_set1_ps(1.0f / total[r]);
        for (int64_t i = 0; i < dim; i += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), to_bf16(_mm512_mul_ps(_mm512_load_ps(w.o + r * dim + i), factor)));
    }
}

}  // namespace

void attention(const AttentionArgs& a) {
    store(a);
    const int64_t group = a.num_heads / a.num_kv_heads;
    std::vector<Rows> tasks;
    for (int64_t r = 0; r < a.num_requests; ++r) {
        const int64_t queries = a.query_start[r + 1] - a.query_start[r], context = a.seq_lens[r] - queries;
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
            for (int64_t first = 0; first < queries * group; first += 16)
                tasks.push_back({r, head, first, std::min<int64_t>(16, queries * group - first), group, context});
    }
    // The longest first, so that no thread is left with a long one at the end.
    if (tasks.size() > 8) std::reverse(tasks.begin(), tasks.end());
    parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
        configure();
        thread_local Scratch scratch;
        scratch.reserve(a.head_dim);
        attend(a, tasks[i], scratch);
    });
}

}  // namespace amx
}  // namespace rabbet

#else

namespace rabbet {
namespace amx {
bool available() { return false; }
int64_t packed_bytes(int64_t, int64_t) { return 0; }
void pack(const uint16_t*, uint16_t*, int64_t, int64_t) {}
void linear(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int) {}
void attention(const AttentionArgs&) {}
}  // namespace amx
}  // namespace rabbet

#endif

// Dense bfloat16 linear layers on AMX tiles. Weights are packed as [O/16][I/32] tiles of 16 pair rows x 16 outputs.
#include "kernels.h"
#include "pool.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "amx.h"

namespace rabbet {
namespace amx {
namespace {

constexpr int64_t kRows = 256;      // rows whose activations stay in the second-level cache while weights pass
constexpr int64_t kPanel = 18;      // steps of inputs whose two column blocks of weights stay in the first-level cache
constexpr int64_t kAhead = 4;       // tiles that are asked for before they are needed
constexpr int64_t kStreamed = 64;   // up to so many rows, reading the weights takes longer than multiplying

inline __m512 silu(__m512 x) {
    // x / (1 + 2^(-x log2 e)); the reciprocal's 14 bits are doubled by one step of Newton.
    const __m512 e = exp2_512(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(126.0f)));
    const __m512 d = _mm512_add_ps(e, _mm512_set1_ps(1.0f));
    const __m512 r = _mm512_rcp14_ps(d);
    return _mm512_mul_ps(x, _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f))));
}

// Results of up to 32 rows x 32 columns on their way out. It is done a row at a time between the products of the next
// ones, since tiles and vectors are computed by different units.
struct Results {
    const float* c = nullptr;  // four tiles: upper rows left, right; lower rows left, right
    uint16_t *left = nullptr, *right = nullptr;
    int64_t stride = 0, rows = 0, row = 0;
    __mmask16 left_mask = 0, right_mask = 0;
    __m512 left_bias, right_bias;
    bool gated = false;

    inline void advance() {
        if (row >= rows) return;
        const float* source = c + row / kTile * 512 + row % kTile * kTile;
        const __m512 x = _mm512_load_ps(source), y = _mm512_load_ps(source + 256);
        if (gated) {
            _mm256_mask_storeu_epi16(left + row * stride, left_mask, to_bf16(_mm512_mul_ps(silu(x), y)));
        } else {
            _mm256_mask_storeu_epi16(left + row * stride, left_mask, to_bf16(_mm512_add_ps(x, left_bias)));
            if (right_mask) _mm256_mask_storeu_epi16(right + row * stride, right_mask, to_bf16(_mm512_add_ps(y, right_bias)));
        }
        ++row;
    }
    inline void finish() {
        while (row < rows) advance();
    }
};

inline void prefetch_tile(const uint16_t* tile) {
    for (int line = 0; line < 16; ++line) _mm_prefetch(reinterpret_cast<const char*>(tile) + line * 64, _MM_HINT_T0);
}

// Up to 32 rows x two column blocks over some steps of the inputs; sums start from c or from zero and end in c.
template <bool kTwo, bool kStream>
inline void product(const uint16_t* a, int64_t stride, const uint16_t* b0, const uint16_t* b1, int64_t steps, bool resume,
                    float* c, Results& results) {
    if (resume) {
        _tile_loadd(0, c, 64);
        _tile_loadd(1, c + 256, 64);
        if (kTwo) {
            _tile_loadd(2, c + 512, 64);
            _tile_loadd(3, c + 768, 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t k = 0; k < steps; ++k) {
        _tile_loadd(4, a + k * kDepth, stride * 2);
        _tile_loadd(6, b0 + k * kTileElements, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1 + k * kTileElements, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (kTwo) {
            _tile_loadd(5, a + kTile * stride + k * kDepth, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (kStream) {
            prefetch_tile(b0 + (k + kAhead) * kTileElements);
            prefetch_tile(b1 + (k + kAhead) * kTileElements);
        }
        results.advance();
        results.advance();
    }
    results.finish();
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
    if (kTwo) {
        _tile_stored(2, c + 512, 64);
        _tile_stored(3, c + 768, 64);
    }
}

struct Layer {
    const uint16_t *x, *packed, *bias;
    uint16_t* out;
    int64_t rows, inputs, width, steps;
    bool gated;

    // Where the results of a pair of column blocks go.
    Results target(int64_t pair, int64_t row, int64_t count, const float* c) const {
        Results to;
        to.c = c, to.rows = count, to.stride = width, to.gated = gated;
        const int64_t column = gated ? pair * kTile : 2 * pair * kTile;
        const auto mask = [&](int64_t from) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(width - from, 0, kTile)) - 1); };
        to.left = out + row * width + column, to.left_mask = mask(column);
        to.right = to.left + kTile, to.right_mask = gated ? 0 : mask(column + kTile);
        to.left_bias = bias ? to_float(_mm256_maskz_loadu_epi16(to.left_mask, bias + column)) : _mm512_setzero_ps();
        to.right_bias = bias ? to_float(_mm256_maskz_loadu_epi16(to.right_mask, bias + column + kTile)) : _mm512_setzero_ps();
        return to;
    }

    template <bool kTwo, bool kStream>
    void rows_of_pair(int64_t pair, int64_t row, int64_t count, float* c, Results& results) const {
        const uint16_t* b0 = packed + (gated ? pair : 2 * pair) * steps * kTileElements;
        const uint16_t* b1 = packed + (gated ? pair + width / kTile : 2 * pair + 1) * steps * kTileElements;
        product<kTwo, kStream>(x + row * inputs, inputs, b0, b1, steps, false, c, results);
        results = target(pair, row, count, c);
    }

    // Rows first .. last of a run of pairs.
    void run(int64_t first, int64_t last, int64_t first_pair, int64_t last_pair) const {
        const int64_t full = first + (last - first) / (2 * kTile) * 2 * kTile, rest = last - full;
        alignas(64) float c[2][4 * 256];
        Results results;
        int turn = 0;
        if (full > first) {
            configure(kTile, kTile);
            for (int64_t pair = first_pair; pair < last_pair; ++pair)
                for (int64_t row = first; row < full; row += 2 * kTile, turn ^= 1) {
                    if (rows <= kStreamed && row == first) rows_of_pair<true, true>(pair, row, 2 * kTile, c[turn], results);
                    else rows_of_pair<true, false>(pair, row, 2 * kTile, c[turn], results);
                }
        }
        if (rest > 0) {
            configure(std::min<int64_t>(rest, kTile), rest - kTile);
            for (int64_t pair = first_pair; pair < last_pair; ++pair, turn ^= 1) {
                if (rest > kTile) rows_of_pair<true, true>(pair, full, rest, c[turn], results);
                else rows_of_pair<false, true>(pair, full, rest, c[turn], results);
            }
        }
        results.finish();
    }

    // As run, for layers whose panel of weights is larger than the first-level cache: a part of the inputs at a time.
    void run_deep(int64_t first, int64_t last, int64_t first_pair, int64_t last_pair) const {
        thread_local std::vector<float> memory;
        if (memory.empty()) memory.resize(kRows / 32 * 1024 + 16);
        float* sums = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
        Results results;
        configure(kTile, kTile);
        for (int64_t pair = first_pair; pair < last_pair; ++pair) {
            const uint16_t* b0 = packed + (gated ? pair : 2 * pair) * steps * kTileElements;
            const uint16_t* b1 = packed + (gated ? pair + width / kTile : 2 * pair + 1) * steps * kTileElements;
            for (int64_t k = 0; k < steps; k += kPanel)
                for (int64_t row = first; row < last; row += 2 * kTile) {
                    float* c = sums + (row - first) / 32 * 1024;
                    product<true, false>(x + row * inputs + k * kDepth, inputs, b0 + k * kTileElements, b1 + k * kTileElements,
                                         std::min(kPanel, steps - k), k > 0, c, results);
                    if (k + kPanel >= steps) results = target(pair, row, 2 * kTile, c);
                }
            results.finish();
        }
    }
};

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

void linear(const LinearArgs& a) {
    const int64_t rows = a.rows, width = a.gated ? a.outputs / 2 : a.outputs;
    const auto in = [](const void* p) { return static_cast<const uint16_t*>(p); };
    const Layer layer{in(a.x), in(a.packed), in(a.bias), static_cast<uint16_t*>(a.out), rows, a.inputs, width, a.inputs / kDepth, a.gated != 0};
    // A task is a chunk of rows times a run of pairs of column blocks. With gating a pair is a gate block and its up block.
    const int64_t pairs = a.gated ? (width + kTile - 1) / kTile : (width + 2 * kTile - 1) / (2 * kTile);
    const int64_t chunks = (rows + kRows - 1) / kRows, threads = pool_size();
    const int64_t run = std::max<int64_t>(1, std::min<int64_t>(rows > kStreamed ? 4 : 32, pairs / (threads * 4)));
    const int64_t runs = (pairs + run - 1) / run;
    parallel_for(chunks * runs, [&](int64_t task, int) {
        const int64_t first = task / runs * kRows, last = std::min(rows, first + kRows);
        const int64_t first_pair = task % runs * run, last_pair = std::min(pairs, first_pair + run);
        const int64_t deep = layer.steps > 24 && rows > kStreamed ? first + (last - first) / 32 * 32 : first;
        if (deep > first) layer.run_deep(first, deep, first_pair, last_pair);
        if (deep < last) layer.run(deep, last, first_pair, last_pair);
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
void linear(const LinearArgs&) {}
}  // namespace amx
}  // namespace rabbet

#endif

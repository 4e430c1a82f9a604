// What the kernels on AMX tiles share. Included only where the compiler has AMX and AVX-512 with bfloat16.
//
// A tile holds 16 rows of 64 bytes. TDPBF16PS: C[16][16] f32 += A[16][32] bf16 * B[32][16] bf16, where B lies in pairs of
// k: row k/2 holds (b[k][n], b[k+1][n]) for each n. Weights, keys and values are kept in that form, so that no kernel
// shuffles anything while it multiplies.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace rabbet {
namespace amx {

constexpr int kTile = 16;   // rows of a tile, columns of C
constexpr int kDepth = 32;  // k of one TDPBF16PS
constexpr int kTileElements = kTile * kDepth;

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0, 1 and 4 have `upper` rows; 2, 3 and 5 have `lower`; 6 and 7, the second operands, are full. Fewer rows make a
// product quicker, and rows that are not there are neither read nor written.
//
// Done at the start of every task and never remembered: other libraries use the tiles of the calling thread too, and
// leave them in a shape of their own or released.
inline void configure(int64_t upper, int64_t lower) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.columns[i] = 64;
        config.rows[i] = static_cast<uint8_t>(i >= 6 ? kTile : i == 2 || i == 3 || i == 5 ? (lower > 0 ? lower : kTile) : upper);
    }
    _tile_loadconfig(&config);
}

inline __m512 to_float(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// 2^x with a relative error below 3e-6, far below a rounding to bfloat16; anything below -150 gives 0.
inline __m512 exp2_512(__m512 x) {
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_set1_ps(0.013534167781472206f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.052011460065841675f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.2414427548646927f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.6930038332939148f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0000026226043701f));
    return _mm512_scalef_ps(y, x);
}

}  // namespace amx
}  // namespace rabbet

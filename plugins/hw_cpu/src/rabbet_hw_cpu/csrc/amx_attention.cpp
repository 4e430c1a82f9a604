// Paged bfloat16 attention on AMX tiles. A page of one head: keys as [S/16][D/32] tiles (pairs of dims x 16 slots), values
// as [S/32][D/16] tiles (pairs of slots x 16 dims). A block has a multiple of 32 slots.
#include "kernels.h"
#include "pool.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "amx.h"

namespace rabbet {
namespace amx {
namespace {

// Keys of one round of the running maximum. Rounds begin at multiples of it whatever a row's window or its neighbours
// are, so that a row is rounded alike alone, in a batch, in a chunk and in a decode.
constexpr int64_t kRound = 128;
constexpr int64_t kStep = 32;  // keys of one tile product
constexpr int64_t kFew = 16;   // rows that are bound by reading keys and values
constexpr float kLog2e = 1.44269504f;
// Stands for minus infinity: the differences of two of it are no NaN.
constexpr float kNever = -1e30f;

inline int64_t key_index(int64_t slot, int64_t dim, int64_t head_dim) {
    return (slot / 16) * 16 * head_dim + (dim / 2) * 32 + (slot % 16) * 2 + dim % 2;
}
inline int64_t value_index(int64_t slot, int64_t dim, int64_t head_dim) {
    return (slot / 32) * 32 * head_dim + (dim / 16) * 512 + (slot % 32) / 2 * 32 + (dim % 16) * 2 + slot % 2;
}

void store(const AttentionArgs& a) {
    const int64_t dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
    const int64_t step = std::max<int64_t>(8, a.num_tokens / (8 * pool_size()));
    parallel_for((a.num_tokens + step - 1) / step, [&](int64_t task, int) {
        for (int64_t token = task * step; token < std::min(a.num_tokens, (task + 1) * step); ++token) {
            const int64_t slot = a.slots[token];
            if (slot < 0) continue;
            const int64_t offset = slot % a.block_size;
            for (int64_t head = 0; head < a.num_kv_heads; ++head) {
                uint16_t* page = static_cast<uint16_t*>(a.cache) + slot / a.block_size * 2 * half + head * head_page;
                const uint16_t* k = static_cast<const uint16_t*>(a.k) + token * a.k_stride + head * dim;
                const uint16_t* v = static_cast<const uint16_t*>(a.v) + token * a.v_stride + head * dim;
                uint16_t* keys = page + key_index(offset, 0, dim);
                uint16_t* values = page + half + value_index(offset, 0, dim);
                for (int64_t i = 0; i < dim; i += 2) std::memcpy(keys + i * 16, k + i, 4);
                for (int64_t block = 0; block < dim / 16; ++block)
                    for (int64_t i = 0; i < 16; ++i) values[block * 512 + i * 2] = v[block * 16 + i];
            }
        }
    });
}

// A thread's memory: queries [32][D], weights [32][kRound], a cleaned step of values [32 x D], scores [32][kRound],
// output [32][D]; each aligned to a line.
struct Scratch {
    std::vector<char> memory;
    uint16_t *q, *p, *v;
    float *s, *o;

    void reserve(int64_t dim) {
        const int64_t sizes[] = {64 * dim, 64 * kRound, 64 * dim, 128 * kRound, 128 * dim};
        int64_t bytes = 64;
        for (const int64_t size : sizes) bytes += size;
        if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
        char* at[5];
        char* next = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        for (int i = 0; i < 5; next += sizes[i++]) at[i] = next;
        q = reinterpret_cast<uint16_t*>(at[0]);
        p = reinterpret_cast<uint16_t*>(at[1]);
        v = reinterpret_cast<uint16_t*>(at[2]);
        s = reinterpret_cast<float*>(at[3]);
        o = reinterpret_cast<float*>(at[4]);
    }
};

// Rows first .. first + count - 1 of (query token, head of the group) of one request and one key head.
struct Rows {
    int64_t request, kv_head, first, count, group, context;
};

// 16 or 32 rows of queries against all their keys, with a running maximum in units of log 2 (arXiv 2205.14135).
struct Attend {
    const AttentionArgs& a;
    const Rows& rows;
    Scratch& w;
    int64_t dim, half, head_page, start, last, lowest;
    const int32_t* table;
    bool two;
    float factor;  // of a score before 2^x
    alignas(64) float peak[32], top[32], shrink[32];
    alignas(64) float total[32][16];
    int64_t position[32];
    const uint16_t* values[kRound / kStep];

    Attend(const AttentionArgs& args, const Rows& r, Scratch& scratch) : a(args), rows(r), w(scratch) {
        dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
        start = a.query_start[rows.request];
        table = a.block_table + rows.request * a.max_blocks;
        two = rows.count > kTile;
        factor = a.soft_cap > 0 ? kLog2e : a.scale * kLog2e;
    }

    int64_t head(int64_t row) const { return rows.kv_head * rows.group + (rows.first + row) % rows.group; }
    int64_t token(int64_t row) const { return start + (rows.first + row) / rows.group; }

    void prepare() {
        for (int64_t r = 0; r < rows.count; ++r) {
            position[r] = rows.context + token(r) - start;
            std::memcpy(w.q + r * dim, static_cast<const uint16_t*>(a.q) + token(r) * a.q_stride + head(r) * dim, dim * 2);
            peak[r] = a.sinks ? a.sinks[head(r)] * kLog2e : kNever;
            _mm512_store_ps(total[r], _mm512_setzero_ps());
            if (a.sinks) total[r][0] = 1.0f;
        }
        for (int64_t r = rows.count; r < 32; ++r) peak[r] = top[r] = kNever;
        std::memset(w.o, 0, rows.count * dim * 4);
        last = position[rows.count - 1];
        lowest = a.window > 0 ? std::max<int64_t>(0, position[0] - a.window + 1) : 0;
        configure(std::min<int64_t>(rows.count, kTile), rows.count - kTile);
    }

    const uint16_t* keys_at(int64_t key) const {
        const uint16_t* page = static_cast<const uint16_t*>(a.cache) +
                               static_cast<int64_t>(table[key / a.block_size]) * 2 * half + rows.kv_head * head_page;
        return page + key % a.block_size * dim;
    }

    // A few rows read all keys and values once, and a load of a tile waits for memory line by line: what the next step takes
    // is asked for while this one is computed. Larger chunks find both in the cache after the first rows.
    void ask(const uint16_t* source) const {
        for (int64_t i = 0; i < kStep * dim; i += 32) _mm_prefetch(reinterpret_cast<const char*>(source + i), _MM_HINT_T0);
    }

    // Scores of the keys first + kStep * begin .. first + kStep * end.
    void scores(int64_t first, int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
            const int64_t key = first + j * kStep;
            const uint16_t* keys = keys_at(key);
            values[j] = keys + half;
            if (rows.count <= kFew) {
                ask(values[j]);
                if (key + kStep <= last) ask(keys_at(key + kStep));
            }
            _tile_zero(0);
            _tile_zero(1);
            if (two) {
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < dim / kDepth; ++k) {
                _tile_loadd(6, keys + k * kTileElements, 64);
                _tile_loadd(4, w.q + k * kDepth, dim * 2);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, keys + 16 * dim + k * kTileElements, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (!two) continue;
                _tile_loadd(5, w.q + 16 * dim + k * kDepth, dim * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            float* target = w.s + j * kStep;
            _tile_stored(0, target, kRound * 4);
            _tile_stored(1, target + 16, kRound * 4);
            if (!two) continue;
            _tile_stored(2, target + 16 * kRound, kRound * 4);
            _tile_stored(3, target + 16 * kRound + 16, kRound * 4);
        }
    }

    // cap * tanh(s * scale / cap), as 1 - 2 / (e^(2x) + 1)
    void cap(int64_t begin, int64_t end) {
        const __m512 one = _mm512_set1_ps(1.0f), limit = _mm512_set1_ps(100.0f);
        const __m512 inner = _mm512_set1_ps(2.0f * kLog2e * a.scale / a.soft_cap), outer = _mm512_set1_ps(a.soft_cap);
        for (int64_t r = 0; r < rows.count; ++r)
            for (int64_t i = begin; i < end; i += 16) {
                float* s = w.s + r * kRound + i;
                const __m512 e = exp2_512(_mm512_min_ps(_mm512_mul_ps(_mm512_load_ps(s), inner), limit));
                const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
                _mm512_store_ps(s, _mm512_mul_ps(outer, tanh));
            }
    }

    // Keys above a row's position or below its window may hold anything: their scores are replaced.
    void mask(int64_t first, int64_t begin, int64_t end) {
        const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int64_t r = 0; r < rows.count; ++r) {
            const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(position[r] - first));
            const int64_t low_key = a.window > 0 ? std::max<int64_t>(position[r] - a.window + 1 - first, 0) : 0;
            const __m512i low = _mm512_set1_epi32(static_cast<int32_t>(low_key));
            for (int64_t i = begin; i < end; i += 16) {
                const __m512i at = _mm512_add_epi32(index, _mm512_set1_epi32(static_cast<int32_t>(i)));
                const __mmask16 kept = _mm512_cmple_epi32_mask(at, high) & _mm512_cmpge_epi32_mask(at, low);
                float* s = w.s + r * kRound + i;
                _mm512_store_ps(s, _mm512_mask_mov_ps(_mm512_set1_ps(kNever), kept, _mm512_load_ps(s)));
            }
        }
    }

    // Scores to weights; what is summed so far shrinks where a maximum rose.
    void weigh(int64_t begin, int64_t end) {
        for (int64_t r = 0; r < rows.count; ++r) {
            __m512 high = _mm512_load_ps(w.s + r * kRound + begin);
            for (int64_t i = begin + 16; i < end; i += 16) high = _mm512_max_ps(high, _mm512_load_ps(w.s + r * kRound + i));
            const float best = _mm512_reduce_max_ps(high);
            top[r] = best == kNever ? peak[r] : std::max(peak[r], best * factor);
        }
        for (int64_t r = 0; r < rows.count; r += 16)
            _mm512_store_ps(shrink + r, exp2_512(_mm512_sub_ps(_mm512_load_ps(peak + r), _mm512_load_ps(top + r))));
        const __m512 scale = _mm512_set1_ps(factor);
        for (int64_t r = 0; r < rows.count; ++r) {
            const float* s = w.s + r * kRound;
            uint16_t* p = w.p + r * kRound;
            if (top[r] == kNever) {
                // Nothing is seen by the row so far.
                std::memset(p + begin, 0, (end - begin) * 2);
                continue;
            }
            const __m512 offset = _mm512_set1_ps(top[r]);
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = begin; i < end; i += 32) {
                const __m512 e0 = exp2_512(_mm512_fmsub_ps(_mm512_load_ps(s + i), scale, offset));
                const __m512 e1 = exp2_512(_mm512_fmsub_ps(_mm512_load_ps(s + i + 16), scale, offset));
                sum = _mm512_add_ps(sum, _mm512_add_ps(e0, e1));
                _mm512_store_si512(p + i, (__m512i)_mm512_cvtne2ps_pbh(e1, e0));
            }
            const bool rises = top[r] != peak[r];
            const __m512 old = _mm512_load_ps(total[r]), less = _mm512_set1_ps(shrink[r]);
            _mm512_store_ps(total[r], rises ? _mm512_fmadd_ps(old, less, sum) : _mm512_add_ps(old, sum));
            if (rises && peak[r] != kNever)
                for (int64_t i = 0; i < dim; i += 16)
                    _mm512_store_ps(w.o + r * dim + i, _mm512_mul_ps(_mm512_load_ps(w.o + r * dim + i), less));
            peak[r] = top[r];
        }
    }

    // Slots that no row sees may hold NaN, and 0 * NaN is NaN: a copy with zeros there stands in for the step.
    void clean(int64_t key, const uint16_t*& source) {
        const int64_t low = lowest - key, high = last + 1 - key;
        for (int64_t d = 0; d < dim / 16; ++d)
            for (int64_t pair = 0; pair < 16; ++pair) {
                const bool even = 2 * pair >= low && 2 * pair < high, odd = 2 * pair + 1 >= low && 2 * pair + 1 < high;
                const __mmask32 kept = (even ? 0x55555555u : 0u) | (odd ? 0xAAAAAAAAu : 0u);
                const int64_t at = d * kTileElements + pair * 32;
                _mm512_store_si512(w.v + at, _mm512_maskz_loadu_epi16(kept, source + at));
            }
        source = w.v;
    }

    void accumulate(int64_t begin, int64_t end) {
        for (int64_t d = 0; d < dim; d += 32) {
            float* o = w.o + d;
            _tile_loadd(0, o, dim * 4);
            _tile_loadd(1, o + 16, dim * 4);
            if (two) {
                _tile_loadd(2, o + 16 * dim, dim * 4);
                _tile_loadd(3, o + 16 * dim + 16, dim * 4);
            }
            for (int64_t j = begin; j < end; ++j) {
                _tile_loadd(4, w.p + j * kStep, kRound * 2);
                _tile_loadd(6, values[j] + d / 16 * kTileElements, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, values[j] + (d / 16 + 1) * kTileElements, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (!two) continue;
                _tile_loadd(5, w.p + 16 * kRound + j * kStep, kRound * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, o, dim * 4);
            _tile_stored(1, o + 16, dim * 4);
            if (two) {
                _tile_stored(2, o + 16 * dim, dim * 4);
                _tile_stored(3, o + 16 * dim + 16, dim * 4);
            }
        }
    }

    void finish() {
        for (int64_t r = 0; r < rows.count; ++r) {
            uint16_t* target = static_cast<uint16_t*>(a.out) + (token(r) * a.num_heads + head(r)) * dim;
            const __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_load_ps(total[r])));
            for (int64_t i = 0; i < dim; i += 16)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), to_bf16(_mm512_mul_ps(_mm512_load_ps(w.o + r * dim + i), by)));
        }
    }

    void run() {
        prepare();
        // The first row sees no key above this, the last row none below that: between them nothing is masked.
        const int64_t full_from = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0, full_to = position[0] + 1;
        for (int64_t first = lowest / kRound * kRound; first <= last; first += kRound) {
            int64_t begin = std::max<int64_t>(lowest - first, 0) / kStep;
            const int64_t end = std::min<int64_t>((last - first) / kStep + 1, kRound / kStep);
            scores(first, begin, end);
            if (a.soft_cap > 0) cap(begin * kStep, end * kStep);
            if (first + begin * kStep < full_from || first + end * kStep > full_to) mask(first, begin * kStep, end * kStep);
            weigh(begin * kStep, end * kStep);
            for (int64_t j = begin; j < end; ++j) {
                const int64_t key = first + j * kStep;
                if (key < lowest || key + kStep > last + 1) {
                    // Both ends in one step, or each in its own: there is one copy, so each is multiplied at once.
                    if (j > begin) accumulate(begin, j);
                    clean(key, values[j]);
                    accumulate(j, j + 1);
                    begin = j + 1;
                }
            }
            if (begin < end) accumulate(begin, end);
        }
        finish();
    }
};

}  // namespace

void attention(const AttentionArgs& a) {
    store(a);
    const int64_t group = a.num_heads / a.num_kv_heads;
    std::vector<Rows> tasks;
    for (int64_t r = 0; r < a.num_requests; ++r) {
        const int64_t queries = a.query_start[r + 1] - a.query_start[r], context = a.seq_lens[r] - queries;
        for (int64_t first = 0; first < queries * group; first += 2 * kTile)
            for (int64_t head = 0; head < a.num_kv_heads; ++head)
                tasks.push_back({r, head, first, std::min<int64_t>(2 * kTile, queries * group - first), group, context});
    }
    // The longest first, so that no thread is left with a long one at the end.
    const auto keys = [](const Rows& rows) { return rows.context + (rows.first + rows.count) / rows.group; };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Rows& x, const Rows& y) { return keys(x) > keys(y); });
    parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
        thread_local Scratch scratch;
        scratch.reserve(a.head_dim);
        Attend(a, tasks[i], scratch).run();
    });
}

}  // namespace amx
}  // namespace rabbet

#else

namespace rabbet {
namespace amx {
void attention(const AttentionArgs&) {}
}  // namespace amx
}  // namespace rabbet

#endif

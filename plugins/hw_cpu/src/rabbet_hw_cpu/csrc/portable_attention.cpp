// Paged attention in plain C++ for float32 and bfloat16, compiled several times; RABBET_VARIANT names the copy.
// A page of one head: keys as [S/16][D] rows of 16 slots, values as [S][D]. So scores are sums of a query's element times
// 16 keys' elements, and nothing is summed across lanes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vectors.h"

namespace rabbet {
namespace RABBET_VARIANT {
namespace {

// Rows whose sums fit in the registers.
#if defined(__AVX512F__)
constexpr int kRegisterRows = 8;
#elif defined(__AVX2__)
constexpr int kRegisterRows = 4;
#else
constexpr int kRegisterRows = 2;
#endif
constexpr int64_t kRows = 32;    // rows of a task
// Keys of one round of the running maximum. Rounds begin at multiples of it whatever a row's window or its neighbours
// are, so that a row is rounded alike alone, in a batch, in a chunk and in a decode.
constexpr int64_t kRound = 128;
constexpr float kLog2e = 1.44269504f;
constexpr float kNever = -1e30f;  // stands for minus infinity: the differences of two of it are no NaN

template <typename T>
void store(const AttentionArgs& a) {
    const int64_t dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
    const int64_t step = std::max<int64_t>(8, a.num_tokens / (8 * pool_size()));
    parallel_for((a.num_tokens + step - 1) / step, [&](int64_t task, int) {
        for (int64_t token = task * step; token < std::min(a.num_tokens, (task + 1) * step); ++token) {
            const int64_t slot = a.slots[token];
            if (slot < 0) continue;
            const int64_t offset = slot % a.block_size;
            for (int64_t head = 0; head < a.num_kv_heads; ++head) {
                T* page = static_cast<T*>(a.cache) + slot / a.block_size * 2 * half + head * head_page;
                const T* k = static_cast<const T*>(a.k) + token * a.k_stride + head * dim;
                T* keys = page + offset / 16 * 16 * dim + offset % 16;
                for (int64_t i = 0; i < dim; ++i) keys[i * 16] = k[i];
                std::memcpy(page + half + offset * dim, static_cast<const T*>(a.v) + token * a.v_stride + head * dim, dim * sizeof(T));
            }
        }
    });
}

// A thread's memory: queries [32][D], scores and then weights [32][kRound], output [32][D].
struct Scratch {
    std::vector<float> memory;
    float *q, *s, *o;
    void reserve(int64_t dim) {
        const int64_t size = kRows * (2 * dim + kRound) + 16;
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        q = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
        o = q + kRows * dim;
        s = o + kRows * dim;
    }
};

// Rows first .. first + count - 1 of (query token, head of the group) of one request and one key head.
struct Rows {
    int64_t request, kv_head, first, count, group, context;
};

// Scores of kCount rows with kGroups groups of 16 keys.
template <typename T, int kCount, int kGroups>
inline void score(const float* q, int64_t dim, const T* const* keys, float* s) {
    F16 sums[kCount][kGroups] = {};
    for (int64_t d = 0; d < dim; ++d)
        for (int g = 0; g < kGroups; ++g) {
            const F16 key = load(keys[g] + d * 16);
            for (int r = 0; r < kCount; ++r) sums[r][g] += key * q[r * dim + d];
        }
    for (int r = 0; r < kCount; ++r)
        for (int g = 0; g < kGroups; ++g) save(s + r * kRound + g * 16, sums[r][g]);
}

// Adds the weighted values of the keys begin .. end to kCount rows and 16 * kGroups dims of the output.
template <typename T, int kCount, int kGroups>
inline void add_values(const float* p, const T* const* values, int64_t begin, int64_t end, int64_t dim, float* o) {
    F16 sums[kCount][kGroups];
    for (int r = 0; r < kCount; ++r)
        for (int g = 0; g < kGroups; ++g) sums[r][g] = load(o + r * dim + g * 16);
    for (int64_t i = begin; i < end; ++i) {
        const T* value = values[i / 16] + i % 16 * dim;
        for (int g = 0; g < kGroups; ++g) {
            const F16 v = load(value + g * 16);
            for (int r = 0; r < kCount; ++r) sums[r][g] += v * p[r * kRound + i];
        }
    }
    for (int r = 0; r < kCount; ++r)
        for (int g = 0; g < kGroups; ++g) save(o + r * dim + g * 16, sums[r][g]);
}

// 32 rows of queries at most against all their keys, with a running maximum in units of log 2 (arXiv 2205.14135).
template <typename T>
struct Attend {
    const AttentionArgs& a;
    const Rows& rows;
    Scratch& w;
    int64_t dim, half, head_page, start, last, lowest;
    float factor;  // of a score before 2^x
    float peak[kRows];
    F16 total[kRows];
    int64_t position[kRows];
    const T* keys[kRound / 16];
    const T* values[kRound / 16];

    Attend(const AttentionArgs& args, const Rows& r, Scratch& scratch) : a(args), rows(r), w(scratch) {
        dim = a.head_dim, head_page = a.block_size * dim, half = a.num_kv_heads * head_page;
        start = a.query_start[rows.request];
        factor = a.soft_cap > 0 ? kLog2e : a.scale * kLog2e;
    }
    int64_t head(int64_t row) const { return rows.kv_head * rows.group + (rows.first + row) % rows.group; }
    int64_t token(int64_t row) const { return start + (rows.first + row) / rows.group; }

    void prepare() {
        for (int64_t r = 0; r < rows.count; ++r) {
            position[r] = rows.context + token(r) - start;
            const T* source = static_cast<const T*>(a.q) + token(r) * a.q_stride + head(r) * dim;
            for (int64_t i = 0; i < dim; ++i) w.q[r * dim + i] = scalar(source[i]);
            peak[r] = a.sinks ? a.sinks[head(r)] * kLog2e : kNever;
            total[r] = F16{};
            if (a.sinks) total[r][0] = 1.0f;
        }
        std::memset(w.o, 0, rows.count * dim * 4);
        last = position[rows.count - 1];
        lowest = a.window > 0 ? std::max<int64_t>(0, position[0] - a.window + 1) : 0;
    }

    // Calls body.operator()<count>(row) over all rows, as many at a time as the registers hold.
    template <typename F>
    void by_rows(F&& body) {
        int64_t r = 0;
        for (; r + kRegisterRows <= rows.count; r += kRegisterRows) body.template operator()<kRegisterRows>(r);
        if constexpr (kRegisterRows > 4)
            for (; r + 4 <= rows.count; r += 4) body.template operator()<4>(r);
        if constexpr (kRegisterRows > 2)
            for (; r + 2 <= rows.count; r += 2) body.template operator()<2>(r);
        for (; r < rows.count; ++r) body.template operator()<1>(r);
    }

    // Scores of the groups begin .. end of 16 keys of a round.
    void scores(int64_t first, int64_t begin, int64_t end) {
        const int32_t* table = a.block_table + rows.request * a.max_blocks;
        for (int64_t g = begin; g < end; ++g) {
            const int64_t key = first + g * 16;
            const T* page = static_cast<const T*>(a.cache) + static_cast<int64_t>(table[key / a.block_size]) * 2 * half + rows.kv_head * head_page;
            keys[g] = page + key % a.block_size * dim;
            values[g] = page + half + key % a.block_size * dim;
        }
        by_rows([&]<int kCount>(int64_t r) {
            constexpr int kGroups = kCount * 2 <= kRegisterRows ? 2 : 1;
            int64_t g = begin;
            for (; g + kGroups <= end; g += kGroups) score<T, kCount, kGroups>(w.q + r * dim, dim, keys + g, w.s + r * kRound + g * 16);
            for (; g < end; ++g) score<T, kCount, 1>(w.q + r * dim, dim, keys + g, w.s + r * kRound + g * 16);
        });
    }

    // cap * tanh(s * scale / cap), as 1 - 2 / (e^(2x) + 1)
    void cap(int64_t begin, int64_t end) {
        const float inner = 2.0f * kLog2e * a.scale / a.soft_cap;
        for (int64_t r = 0; r < rows.count; ++r)
            for (int64_t i = begin; i < end; i += 16) {
                float* s = w.s + r * kRound + i;
                const F16 x = load(s) * inner, limit = all(100.0f);
                save(s, a.soft_cap * (1.0f - 2.0f / (exp2_16(x < limit ? x : limit) + 1.0f)));
            }
    }

    // Keys above a row's position or below its window may hold anything: their scores are replaced.
    void mask(int64_t first, int64_t begin, int64_t end) {
        const I16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t r = 0; r < rows.count; ++r) {
            const int32_t high = static_cast<int32_t>(position[r] - first);
            const int32_t low = a.window > 0 ? static_cast<int32_t>(std::max<int64_t>(position[r] - a.window + 1 - first, 0)) : 0;
            for (int64_t i = begin; i < end; i += 16) {
                const I16 at = index + static_cast<int32_t>(i);
                float* s = w.s + r * kRound + i;
                const I16 hidden = (at > high) | (at < low);
                save(s, hidden ? all(kNever) : load(s));
            }
        }
    }

    // Scores to weights; what is summed so far shrinks where a maximum rose.
    void weigh(int64_t begin, int64_t end) {
        for (int64_t r = 0; r < rows.count; ++r) {
            float* s = w.s + r * kRound;
            F16 high = load(s + begin);
            for (int64_t i = begin + 16; i < end; i += 16) {
                const F16 x = load(s + i);
                high = high > x ? high : x;
            }
            float best = high[0];
            for (int i = 1; i < 16; ++i) best = std::max(best, high[i]);
            const float top = best == kNever ? peak[r] : std::max(peak[r], best * factor);
            if (top == kNever) {
                std::memset(s + begin, 0, (end - begin) * 4);  // nothing is seen by the row so far
                continue;
            }
            F16 sum = {};
            for (int64_t i = begin; i < end; i += 16) {
                const F16 weight = exp2_16(load(s + i) * factor - top);
                sum += weight;
                save(s + i, weight);
            }
            if (top == peak[r]) {
                total[r] += sum;
                continue;
            }
            const float shrink = peak[r] == kNever ? 0.0f : std::exp2(peak[r] - top);
            total[r] = total[r] * shrink + sum;
            for (int64_t i = 0; i < dim; i += 16) save(w.o + r * dim + i, load(w.o + r * dim + i) * shrink);
            peak[r] = top;
        }
    }

    void accumulate(int64_t begin, int64_t end) {
        by_rows([&]<int kCount>(int64_t r) {
            constexpr int kGroups = kCount * 2 <= kRegisterRows ? 2 : 1;
            int64_t d = 0;
            for (; d + 16 * kGroups <= dim; d += 16 * kGroups)
                add_values_at<kCount, kGroups>(r, d, begin, end);
            for (; d < dim; d += 16) add_values_at<kCount, 1>(r, d, begin, end);
        });
    }
    template <int kCount, int kGroups>
    void add_values_at(int64_t r, int64_t d, int64_t begin, int64_t end) {
        const T* shifted[kRound / 16];
        for (int64_t g = begin / 16; g < (end + 15) / 16; ++g) shifted[g] = values[g] + d;
        add_values<T, kCount, kGroups>(w.s + r * kRound, shifted, begin, end, dim, w.o + r * dim + d);
    }

    void run() {
        prepare();
        // The first row sees no key above this, the last row none below that: between them nothing is masked.
        const int64_t full_from = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0, full_to = position[0] + 1;
        for (int64_t first = lowest / kRound * kRound; first <= last; first += kRound) {
            const int64_t begin = std::max<int64_t>(lowest - first, 0), end = std::min(last + 1 - first, kRound);
            const int64_t from = begin / 16 * 16, to = (end + 15) / 16 * 16;
            scores(first, from / 16, to / 16);
            if (a.soft_cap > 0) cap(from, to);
            if (first + from < full_from || first + to > full_to) mask(first, from, to);
            weigh(from, to);
            accumulate(begin, end);  // not a slot more: others may hold NaN
        }
        for (int64_t r = 0; r < rows.count; ++r) {
            T* target = static_cast<T*>(a.out) + (token(r) * a.num_heads + head(r)) * dim;
            float sum = 0;
            for (int i = 0; i < 16; ++i) sum += total[r][i];
            for (int64_t i = 0; i < dim; i += 16) save(target + i, load(w.o + r * dim + i) * (1.0f / sum));
        }
    }
};

template <typename T>
void attention_t(const AttentionArgs& a) {
    store<T>(a);
    const int64_t group = a.num_heads / a.num_kv_heads;
    std::vector<Rows> tasks;
    for (int64_t r = 0; r < a.num_requests; ++r) {
        const int64_t queries = a.query_start[r + 1] - a.query_start[r], context = a.seq_lens[r] - queries;
        for (int64_t first = 0; first < queries * group; first += kRows)
            for (int64_t head = 0; head < a.num_kv_heads; ++head)
                tasks.push_back({r, head, first, std::min(kRows, queries * group - first), group, context});
    }
    // The longest first, so that no thread is left with a long one at the end.
    const auto keys = [](const Rows& rows) { return rows.context + (rows.first + rows.count) / rows.group; };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Rows& x, const Rows& y) { return keys(x) > keys(y); });
    parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
        thread_local Scratch scratch;
        scratch.reserve(a.head_dim);
        Attend<T>(a, tasks[i], scratch).run();
    });
}

}  // namespace

void attention(const AttentionArgs& args, int type) { type == 0 ? attention_t<float>(args) : attention_t<bf16>(args); }

}  // namespace RABBET_VARIANT
}  // namespace rabbet

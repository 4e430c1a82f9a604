// Dense linear layers in plain C++ for float32 and bfloat16; RABBET_VARIANT names the copy.
// Weights are packed as [O/16][I] rows of 16 outputs. A result is the sum over the inputs in their order, whatever the
// number of rows: a row is rounded alike alone and in a batch.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vectors.h"

namespace rabbet {
namespace RABBET_VARIANT {
namespace {

// Rows and groups of 16 columns whose sums fit in the registers.
#if defined(__AVX512F__)
constexpr int kRegisterRows = 8, kGroups = 3;
#elif defined(__AVX2__)
constexpr int kRegisterRows = 5, kGroups = 1;
#else
constexpr int kRegisterRows = 2, kGroups = 1;
#endif
constexpr int64_t kRows = 128;    // rows of a task
constexpr int64_t kPanel = 384;   // inputs whose weights of some groups stay in the first-level cache
constexpr int64_t kAhead = 1024;  // bytes of weights that are asked for before they are needed

inline F16 silu(const F16& x) {
    const F16 limit = all(126.0f), power = x * -1.44269504f;
    return x / (1.0f + exp2_16(power < limit ? power : limit));
}

// Adds kCount rows times some groups of columns over `inputs` inputs to c, [rows][kGroups * 16].
template <typename T, int kCount, int kWidth>
void product(const float* x, int64_t stride, const T* weights, int64_t group_size, int64_t inputs, float* c) {
    F16 sums[kCount][kWidth];
    for (int r = 0; r < kCount; ++r)
        for (int g = 0; g < kWidth; ++g) sums[r][g] = load(c + (r * kGroups + g) * 16);
    for (int64_t i = 0; i < inputs; ++i) {
        for (int g = 0; g < kWidth; ++g) {
            const T* weight = weights + g * group_size + i * 16;
            const F16 w = load(weight);
            if (kCount < kRegisterRows) __builtin_prefetch(reinterpret_cast<const char*>(weight) + kAhead);
            for (int r = 0; r < kCount; ++r) sums[r][g] += w * x[r * stride + i];
        }
    }
    for (int r = 0; r < kCount; ++r)
        for (int g = 0; g < kWidth; ++g) save(c + (r * kGroups + g) * 16, sums[r][g]);
}

template <typename T>
using Product = void (*)(const float*, int64_t, const T*, int64_t, int64_t, float*);

// The products for 1 .. kRegisterRows rows and 1 .. kGroups groups.
template <typename T, int... kIndex>
constexpr auto products(std::integer_sequence<int, kIndex...>) {
    struct Table {
        Product<T> of[sizeof...(kIndex)];
    };
    return Table{{product<T, kIndex / kGroups + 1, kIndex % kGroups + 1>...}};
}

template <typename T>
struct Layer {
    const T *x, *packed, *bias;
    T* out;
    int64_t rows, inputs, outputs, width;
    bool gated;

    // Sums of the rows first .. last and of count groups from `group`, into c.
    void sums(const float* input, int64_t first, int64_t last, int64_t group, int64_t count, float* c) const {
        static constexpr auto table = products<T>(std::make_integer_sequence<int, kRegisterRows * kGroups>());
        std::fill(c, c + (last - first) * kGroups * 16, 0.0f);
        for (int64_t i = 0; i < inputs; i += kPanel)
            for (int64_t row = first; row < last; row += kRegisterRows) {
                const int64_t here = std::min<int64_t>(kRegisterRows, last - row);
                table.of[(here - 1) * kGroups + count - 1](input + (row - first) * inputs + i, inputs,
                                                           packed + group * inputs * 16 + i * 16, inputs * 16,
                                                           std::min(kPanel, inputs - i), c + (row - first) * kGroups * 16);
            }
    }

    // The rows first .. last of groups of columns; `input` holds them in float32.
    void run(const float* input, int64_t first, int64_t last, int64_t group, int64_t end, float* c) const {
        float* up = c + kRows * kGroups * 16;
        for (; group < end; group += kGroups) {
            const int64_t count = std::min<int64_t>(kGroups, end - group);
            sums(input, first, last, group, count, c);
            if (gated) sums(input, first, last, group + width / 16, count, up);
            for (int64_t row = first; row < last; ++row)
                for (int64_t g = 0; g < count; ++g) {
                    const int64_t at = ((row - first) * kGroups + g) * 16, column = (group + g) * 16;
                    F16 y = load(c + at);
                    if (gated) y = silu(y) * load(up + at);
                    store_some(y, row, column);
                }
        }
    }

    void store_some(F16 y, int64_t row, int64_t column) const {
        T* target = out + row * width + column;
        if (column + 16 <= width) {
            if (bias) y += load(bias + column);
            save(target, y);
            return;
        }
        T part[16] = {};
        const int64_t count = width - column;
        if (bias) {
            std::memcpy(part, bias + column, count * sizeof(T));
            y += load(part);
        }
        save(part, y);
        std::memcpy(target, part, count * sizeof(T));
    }
};

template <typename T>
void linear_t(const LinearArgs& a) {
    const int64_t width = a.gated ? a.outputs / 2 : a.outputs, groups = (width + 15) / 16;
    const Layer<T> layer{static_cast<const T*>(a.x), static_cast<const T*>(a.packed), static_cast<const T*>(a.bias),
                         static_cast<T*>(a.out),     a.rows, a.inputs, a.outputs, width, a.gated != 0};
    const int64_t chunks = (a.rows + kRows - 1) / kRows;
    const int64_t panels = (groups + kGroups - 1) / kGroups;
    const int64_t run = std::clamp<int64_t>(panels / (pool_size() * 4), 1, 16) * kGroups;
    const int64_t runs = (groups + run - 1) / run;
    parallel_for(chunks * runs, [&](int64_t task, int) {
        thread_local std::vector<float> memory;
        const int64_t first = task / runs * kRows, last = std::min(a.rows, first + kRows);
        const int64_t converted = sizeof(T) == 4 ? 0 : (last - first) * a.inputs;
        const int64_t size = 2 * kRows * kGroups * 16 + converted + 16;
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        float* c = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
        const float* input = reinterpret_cast<const float*>(layer.x) + first * a.inputs;
        if (sizeof(T) != 4) {
            float* copy = c + 2 * kRows * kGroups * 16;
            for (int64_t i = 0; i < converted; ++i) copy[i] = scalar(layer.x[first * a.inputs + i]);
            input = copy;
        }
        layer.run(input, first, last, task % runs * run, std::min(groups, task % runs * run + run), c);
    });
}

template <typename T>
void pack_t(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
    parallel_for((outputs + 15) / 16, [&](int64_t group, int) {
        T* target = packed + group * inputs * 16;
        for (int64_t i = 0; i < inputs; ++i)
            for (int64_t n = 0; n < 16; ++n) {
                const int64_t row = group * 16 + n;
                *target++ = row < outputs ? weight[row * inputs + i] : T{};
            }
    });
}

}  // namespace

void linear(const LinearArgs& args, int type) { type == 0 ? linear_t<float>(args) : linear_t<bf16>(args); }

void pack(const void* weight, void* packed, int64_t outputs, int64_t inputs, int type) {
    if (type == 0) pack_t(static_cast<const float*>(weight), static_cast<float*>(packed), outputs, inputs);
    else pack_t(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), outputs, inputs);
}

}  // namespace RABBET_VARIANT
}  // namespace rabbet

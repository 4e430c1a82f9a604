// Kernels in plain C++, compiled several times with different instruction sets; RABBET_VARIANT names the copy.
// Loops are written so that the compiler vectorises them; sums are in float32.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace rabbet {
namespace RABBET_VARIANT {
namespace {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    // Round to nearest even; NaN keeps a bit of its fraction.
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    out.bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

// Rows that one task takes: enough work to be worth handing out.
inline int64_t rows_per_task(int64_t rows, int64_t size) {
    const int64_t enough = std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1));
    return std::max(enough, (rows + 4 * pool_size() - 1) / (4 * pool_size()));
}

template <typename F>
void over_rows(int64_t rows, int64_t size, F&& body) {
    const int64_t step = rows_per_task(rows, size);
    parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
        const int64_t end = std::min(rows, (task + 1) * step);
        for (int64_t row = task * step; row < end; ++row) body(row);
    });
}

template <typename T>
float mean_square(const T* x, int64_t size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += to_float(x[i]) * to_float(x[i]);
    return sum / static_cast<float>(size);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    const float factor = 1.0f / std::sqrt(mean_square(x, size) + eps);
    for (int64_t i = 0; i < size; ++i) {
        // The normalised value is rounded before it is scaled, as checkpoints were trained.
        T rounded;
        from_float(to_float(x[i]) * factor, rounded);
        from_float(to_float(rounded) * to_float(weight[i]), out[i]);
    }
}

template <typename T>
void rms_norm_t(const void* x, const void* weight, void* out, int64_t rows, int64_t size, int64_t stride, float eps) {
    over_rows(rows, size, [&](int64_t row) {
        norm_row(static_cast<const T*>(x) + row * stride, static_cast<const T*>(weight), static_cast<T*>(out) + row * size,
                 size, eps);
    });
}

template <typename T>
void add_rms_norm_t(void* x, void* residual, const void* weight, int64_t rows, int64_t size, float eps) {
    over_rows(rows, size, [&](int64_t row) {
        T* px = static_cast<T*>(x) + row * size;
        T* pr = static_cast<T*>(residual) + row * size;
        for (int64_t i = 0; i < size; ++i) from_float(to_float(px[i]) + to_float(pr[i]), pr[i]);
        norm_row(pr, static_cast<const T*>(weight), px, size, eps);
    });
}

template <typename T>
void rotary_t(void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads, int64_t dim,
              int64_t rotated, int64_t stride, int neox) {
    const int64_t half = rotated / 2;
    over_rows(rows, heads * dim, [&](int64_t row) {
        const float* cos = cos_sin + positions[row] * rotated;
        const float* sin = cos + half;
        for (int64_t head = 0; head < heads; ++head) {
            T* p = static_cast<T*>(x) + row * stride + head * dim;
            if (neox) {
                for (int64_t i = 0; i < half; ++i) {
                    const float a = to_float(p[i]), b = to_float(p[i + half]);
                    from_float(a * cos[i] - b * sin[i], p[i]);
                    from_float(b * cos[i] + a * sin[i], p[i + half]);
                }
            } else {
                for (int64_t i = 0; i < half; ++i) {
                    const float a = to_float(p[2 * i]), b = to_float(p[2 * i + 1]);
                    from_float(a * cos[i] - b * sin[i], p[2 * i]);
                    from_float(b * cos[i] + a * sin[i], p[2 * i + 1]);
                }
            }
        }
    });
}

// Activations: 0 silu, 1 gelu, 2 gelu with tanh.
inline float activate(float x, int kind) {
    if (kind == 0) return x / (1.0f + std::exp(-x));
    if (kind == 1) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

template <typename T>
void gated_t(const void* x, void* out, int64_t rows, int64_t size, int activation) {
    over_rows(rows, 4 * size, [&](int64_t row) {
        const T* gate = static_cast<const T*>(x) + row * 2 * size;
        const T* up = gate + size;
        T* o = static_cast<T*>(out) + row * size;
        for (int64_t i = 0; i < size; ++i) {
            T rounded;
            from_float(activate(to_float(gate[i]), activation), rounded);
            from_float(to_float(rounded) * to_float(up[i]), o[i]);
        }
    });
}

}  // namespace

#define RABBET_BOTH(name, ...) (type == 0 ? name<float>(__VA_ARGS__) : name<bf16>(__VA_ARGS__))

Variant variant() {
    Variant v;
    v.rms_norm = [](const void* x, const void* w, void* o, int64_t r, int64_t n, int64_t s, float e, int type) {
        RABBET_BOTH(rms_norm_t, x, w, o, r, n, s, e);
    };
    v.add_rms_norm = [](void* x, void* res, const void* w, int64_t r, int64_t n, float e, int type) {
        RABBET_BOTH(add_rms_norm_t, x, res, w, r, n, e);
    };
    v.rotary = [](void* x, const int64_t* p, const float* c, int64_t r, int64_t h, int64_t d, int64_t n, int64_t s, int neox,
                  int type) { RABBET_BOTH(rotary_t, x, p, c, r, h, d, n, s, neox); };
    v.gated = [](const void* x, void* o, int64_t r, int64_t n, int act, int type) { RABBET_BOTH(gated_t, x, o, r, n, act); };
    v.attention = attention;
    v.linear = linear;
    v.pack = pack;
    return v;
}

}  // namespace RABBET_VARIANT
}  // namespace rabbet

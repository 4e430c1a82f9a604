// 16 numbers at a time in the compiler's own vectors: one register, two or four, as RABBET_VARIANT has them.
#pragma once
#include <cstdint>
#include <cstring>

namespace rabbet {
namespace RABBET_VARIANT {
namespace {

using F16 = float __attribute__((vector_size(64)));
using I16 = int32_t __attribute__((vector_size(64)));
using H16 = uint16_t __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline F16 load(const float* p) {
    F16 x;
    std::memcpy(&x, p, 64);
    return x;
}
inline F16 load(const bf16* p) {
    H16 x;
    std::memcpy(&x, p, 32);
    using U16 = uint32_t __attribute__((vector_size(64)));
    return (F16)(__builtin_convertvector(x, U16) << 16);
}
inline void save(float* p, const F16& x) { std::memcpy(p, &x, 64); }
inline void save(bf16* p, const F16& x) {
    using U16 = uint32_t __attribute__((vector_size(64)));
    const U16 bits = (U16)x;
    // Round to nearest even; NaN keeps a bit of its fraction.
    const U16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const U16 nan = (bits >> 16) | 0x40;
    const U16 chosen = (bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded;
    const H16 half = __builtin_convertvector(chosen, H16);
    std::memcpy(p, &half, 32);
}
inline float scalar(float x) { return x; }
inline float scalar(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline F16 all(float x) { return F16{} + x; }

// 2^x with a relative error below 1e-7; anything below -126 gives 0. At most 127, or NaN, which stays.
inline F16 exp2_16(const F16& x) {
    const F16 low = all(-126.0f), clamped = x < low ? low : x;
    const F16 magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const F16 whole = (clamped + magic) - magic, rest = clamped - whole;
    F16 y = all(0.00015345810970757157f);
    y = y * rest + 0.0013399930903688073f;
    y = y * rest + 0.009618489071726799f;
    y = y * rest + 0.05550328642129898f;
    y = y * rest + 0.24022646248340607f;
    y = y * rest + 0.6931471824645996f;
    y = y * rest + 1.0f;
    const I16 power = (__builtin_convertvector(whole, I16) + 127) << 23;
    y *= (F16)power;
    return x < low ? F16{} : y;
}

}  // namespace
}  // namespace RABBET_VARIANT
}  // namespace rabbet

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hybridpar {

// The numbers are part of the binding: Python passes them in uint8 arrays.
// Packing takes the first four, reductions take all.
enum class DType : std::uint8_t { float32 = 0, float64 = 1, bfloat16 = 2, float16 = 3, int64 = 4, uint8 = 5 };

inline constexpr std::uint8_t kDTypes = 4;
inline constexpr std::uint8_t kReducedDTypes = 6;

inline constexpr std::size_t item_size(DType dtype) {
    constexpr std::size_t sizes[] = {4, 8, 2, 2, 8, 1};
    return sizes[static_cast<std::size_t>(dtype)];
}

// The half formats are carried as their bits, so that no compiler support for them is needed.
struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// Note [half conversions]
// All conversions below are branch-free, so that compilers turn the loops around them into vector code
// on any instruction set. Both half formats round to nearest, ties to even, and keep NaN a NaN, as
// IEEE 754 asks and PyTorch does.

inline float to_float(float value) {
    return value;
}

inline float to_float(BFloat16 value) {
    return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float to_float(Float16 value) {
    const std::uint32_t magnitude = value.bits & 0x7fffu;
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    // Subnormals are integer multiples of 2^-24; an int -> float conversion is exact there and, unlike
    // arithmetic on float subnormals, does not depend on the thread's flush-to-zero mode.
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    const std::uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
    const std::uint32_t normal = (magnitude << 13) + rebias;
    return bit_cast<float>((magnitude < 0x0400u ? bit_cast<std::uint32_t>(subnormal) : normal) | sign);
}

inline void store(float &target, float value) {
    target = value;
}

// The nearest bfloat16 in the upper half of the word; the lower half is undefined. A NaN becomes a quiet one.
inline std::uint32_t round_to_upper_half(float value) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return value != value ? bits | 0x00400000u : rounded;
}

inline void store(BFloat16 &target, float value) {
    target.bits = static_cast<std::uint16_t>(round_to_upper_half(value) >> 16);
}

inline void store(Float16 &target, float value) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 to a value below 2^-14 leaves its multiple of 2^-24, rounded to even, in the low bits.
    const std::uint32_t subnormal = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    // From 65520 on the nearest half is infinity.
    const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    target.bits = static_cast<std::uint16_t>((magnitude >= 0x477ff000u ? special : finite) | sign);
}

} // namespace hybridpar

#pragma once

#include <cmath>
#include <cstdint>

#include "clones.h"
#include "types.h"

namespace hybridpar {

// exp, without branches or calls, so that loops around it become vector code. Within 2 units in the last place; 0 where
// the result would be no normal number, and +inf from 88.73 on. NaN stays NaN.
HYBRIDPAR_INLINE float exponential(float x) {
    // x = k ln 2 + r with |r| <= ln 2 / 2. The first part of ln 2 has few digits, so that k times it is exact.
    constexpr float kMost = 88.7228394f, kLeast = -87.0f;
    const float limited = x > kMost ? kMost : (x < kLeast ? kLeast : x);
    // Adding 1.5 * 2^23 rounds to a whole number, which then lies in the lowest bits.
    constexpr float kShift = 12582912.0f;
    const float shifted = limited * 1.44269504f + kShift;
    const float k = shifted - kShift;
    const float r = (limited - k * 0.693359375f) - k * -2.12194440e-4f;
    // exp(r) = 1 + r + r^2 q(r), q by Remez on that interval (as in Cephes).
    float q = 1.9875691500e-4f;
    q = q * r + 1.3981999507e-3f;
    q = q * r + 8.3334519073e-3f;
    q = q * r + 4.1665795894e-2f;
    q = q * r + 1.6666665459e-1f;
    q = q * r + 5.0000001201e-1f;
    const float mantissa = (q * r) * r + r + 1.0f;
    // 2^k in two factors: k is 128 for the largest results.
    const std::int32_t power = static_cast<std::int32_t>(bit_cast<std::uint32_t>(shifted) - 0x4b400000u);
    const std::int32_t half = power >> 1;
    const float first = bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
    const float second = bit_cast<float>(static_cast<std::uint32_t>(power - half + 127) << 23);
    const float value = (mantissa * first) * second;
    return x < kLeast ? 0.0f : (x > kMost ? INFINITY : value);
}

HYBRIDPAR_INLINE double exponential(double x) {
    return std::exp(x);
}

} // namespace hybridpar

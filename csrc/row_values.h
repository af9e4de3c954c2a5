#pragma once

#include <cstddef>
#include <cstdint>

#include "clones.h"
#include "row_update.h"
#include "splitmix.h"

// What the loops over rows in row_update.cc and row_sgd.cc have in common.

namespace hybridpar {

inline constexpr double kSmallestNorm = 1e-12;
inline constexpr std::int64_t kLanes = 32;

// 32 random bits of a counter.
HYBRIDPAR_INLINE std::uint32_t scrambled(std::uint32_t counter) {
    counter = (counter ^ (counter >> 16)) * 0x7feb352du;
    counter = (counter ^ (counter >> 15)) * 0x846ca68bu;
    return counter ^ (counter >> 16);
}

// Up with the probability that the lower half of the bits says. Infinity and NaN stay what they are.
HYBRIDPAR_INLINE BFloat16 rounded_at_random(float value, std::uint32_t random) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const std::uint32_t quiet = value != value ? bits | 0x00400000u : bits;
    return {static_cast<std::uint16_t>((finite ? bits + (random & 0xffffu) : quiet) >> 16)};
}

// Of one row and what is stored of it: its weight, its states.
HYBRIDPAR_INLINE std::uint32_t row_seed(const Rounding &rounding, std::uint64_t stream, std::int64_t row) {
    return static_cast<std::uint32_t>(mixed(mixed(rounding.seed + stream) + static_cast<std::uint64_t>(row)));
}

// 32 random bits for column `d` of a row.
HYBRIDPAR_INLINE std::uint32_t random_bits(std::uint32_t seed, std::int64_t d) {
    return scrambled(seed + static_cast<std::uint32_t>(d) * 0x9e3779b9u);
}

// The sum of kLanes sums, which are overwritten.
template <typename Exact>
HYBRIDPAR_INLINE Exact total(Exact *lanes) {
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2)
        for (std::int64_t lane = 0; lane < half; ++lane)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// Rows that are drawn lie anywhere: the next one is fetched while this one is worked on.
HYBRIDPAR_INLINE void fetch_ahead(const void *base, DType dtype, std::int64_t row, std::int64_t width) {
#if defined(__GNUC__)
    const auto bytes = static_cast<std::size_t>(width) * item_size(dtype);
    const auto *begin = static_cast<const char *>(base) + static_cast<std::size_t>(row) * bytes;
    for (std::size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(begin + at);
#endif
}

// One step of SGD for the rows [begin, end) of `rows.count`, in one pass over memory, where rows and momentum are
// float32 or bfloat16 and so is the gradient. False if they are not, and nothing is done.
bool sgd_fused(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient, const State &momentum,
               const Sgd &policy, const Rounding &rounding);

} // namespace hybridpar

#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace hybridpar {

enum class Reduction : std::uint8_t { sum = 0, max = 1, min = 2 };

inline constexpr std::uint8_t kReductions = 3;

// target[i] = source_0[i] (+) source_1[i] (+) ..., taken in that order, into every target. A target may be one
// of the sources; otherwise nothing overlaps. One source at least.
//
// The half types are added up in float32 and rounded once, to nearest, ties to even. int64 and uint8 wrap
// around. The maximum or minimum with a NaN is a NaN.
void reduce(const void *const *sources, std::size_t source_count, void *const *targets, std::size_t target_count,
            std::int64_t count, DType dtype, Reduction reduction);

// memcpy for memory that another core has just written. Library versions that use string instructions wait for
// every line there; plain loads let the core fetch ahead.
void copy_shared(void *target, const void *source, std::size_t bytes);

// The same into several targets, reading the source once.
void spread(void *const *targets, std::size_t target_count, const void *source, std::size_t bytes);

} // namespace hybridpar

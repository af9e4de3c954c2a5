#pragma once

#include <cstdint>

namespace hybridpar {

// Draws `count` of the numbers in [0, size) that are not in `kept`, without replacement, each set of them equally
// likely, and writes these and the kept ones to `result` [kept_count + count] in ascending order. In time and memory of
// the order of that, whatever `size` is (Floyd's algorithm, and a radix sort). The same seed gives the same numbers.
//
// `kept` is ascending, without repetition, in [0, size); count <= size - kept_count.
void draw_with(const std::int64_t *kept, std::int64_t kept_count, std::int64_t size, std::int64_t count,
               std::uint64_t seed, std::int64_t *result);

} // namespace hybridpar

#pragma once

#include <cstdint>

#include "types.h"

namespace hybridpar {

// Row i of `rows` [count, width] becomes that of class `classes[i]`: normal draws times `deviation`. Element (c, d) is
// the (c width + d)-th output of a SplitMix64 stream that starts at a hash of the seed, sent through the inverse of the
// normal distribution; so it depends on the seed, c, d and the width alone, and has the same bits on every machine.
void draw_normal_rows(const std::int64_t *classes, std::int64_t count, std::int64_t width, std::uint64_t seed,
                      double deviation, DType dtype, void *rows, std::int64_t threads);

} // namespace hybridpar

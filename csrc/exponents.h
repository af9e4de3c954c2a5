#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace hybridpar {

// Note [compressed exponents]
// Neighbouring gradients are of like magnitude: of the 8 bits of an exponent less than 3 say something new, while sign
// and mantissa are noise. So values are taken in blocks of 256. A block says in its first two bytes how many bits each
// exponent takes and which one is the largest of a window; then come the distances from it, in that many bits; whole
// exponents of those outside the window, whose distance is the largest code; signs and upper mantissas, a byte each;
// and of float32 the lower halves of the values as they are. The window is the cheapest of several. Where zeros are
// many, they have a code of their own, and nothing else. A block of zeros is nothing but its first two bytes, and no
// block is longer than its values by more than these.
//
// The bits of a code lie in planes of 32 bytes: bit k of byte j belongs to value 32 k + j, so that planes are made and
// read with vectors of bytes. The last block is filled up with zeros.

inline constexpr std::int64_t kExponentBlock = 256;

// Bytes that `compress_exponents` writes at most.
std::size_t compressed_bound(std::int64_t count, DType dtype);

// Writes `count` values of bfloat16 or float32 in a shorter form that keeps every bit; returns its bytes.
std::size_t compress_exponents(const void *values, std::int64_t count, DType dtype, std::uint8_t *target);

// The inverse: `values` become those that were compressed or, with `add`, the sums of theirs and those (bfloat16 is
// rounded once, to nearest). Throws std::invalid_argument where the bytes are not what `count` values were turned into.
void expand_exponents(const std::uint8_t *source, std::size_t bytes, void *values, std::int64_t count, DType dtype,
                      bool add);

} // namespace hybridpar

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "reduce.h"

// How the collectives in shared memory cut data, and copy what they have cut.

namespace hybridpar {

inline constexpr std::size_t kLine = 64;

inline std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

inline std::int64_t divide_up(std::int64_t count, std::int64_t by) {
    return (count + by - 1) / by;
}

struct Range {
    std::int64_t begin, end;

    std::int64_t length() const {
        return end - begin;
    }
};

// The part of `count` elements that is rank's, in whole cache lines.
inline Range slice(std::int64_t count, std::size_t rank, std::size_t size, std::size_t item) {
    const auto line = static_cast<std::int64_t>(kLine / item);
    const std::int64_t length = divide_up(divide_up(count, static_cast<std::int64_t>(size)), line) * line;
    const std::int64_t begin = std::min(count, length * static_cast<std::int64_t>(rank));
    return {begin, std::min(count, begin + length)};
}

inline Range piece(std::int64_t count, std::int64_t chunk, std::int64_t chunk_count) {
    const std::int64_t begin = std::min(count, chunk * chunk_count);
    return {begin, std::min(count, begin + chunk_count)};
}

// What both have; its length is negative or zero where that is nothing.
inline Range common(Range one, Range other) {
    return {std::max(one.begin, other.begin), std::min(one.end, other.end)};
}

inline void copy_items(std::byte *target, const std::byte *source, std::int64_t count, std::size_t item = 1) {
    if (count > 0) std::memcpy(target, source, static_cast<std::size_t>(count) * item);
}

// The same from memory that another rank has written.
inline void fetch_items(std::byte *target, const std::byte *source, std::int64_t count, std::size_t item = 1) {
    if (count > 0) copy_shared(target, source, static_cast<std::size_t>(count) * item);
}

inline std::int64_t sum_of(const std::vector<std::int64_t> &sizes, std::size_t length) {
    return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(length), std::int64_t{0});
}

} // namespace hybridpar

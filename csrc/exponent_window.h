#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "clones.h"
#include "exponents.h"

// How exponents.cc chooses the codes of a block. Everything is inlined there, so that it is compiled for each
// instruction set.
namespace hybridpar::exponents {

constexpr std::int64_t kBlock = kExponentBlock;
// Bytes of a plane, and values to each of its bytes.
constexpr int kLanes = 32, kDepth = 8;
static_assert(kLanes * kDepth == kBlock);

// The first byte of a block: how many bits of each exponent there are, kSparse more where zeros have a code of their
// own; or one of the others.
constexpr int kWidest = 4, kWhole = 8, kSparse = 16, kZeros = 255;
constexpr std::size_t kHead = 2;
// From so many zeros on they have a code of their own. Not of fewer than two bits, so that exponents have one, too; and
// of so many that what they save is more than the longest exponents take.
constexpr int kManyZeros = 64, kNarrowestSparse = 2;
static_assert(kManyZeros >= kLanes * kNarrowestSparse);
// A window begins at the largest exponent of the block or up to so many below it.
constexpr int kShifts = 5;

using Bytes = std::array<std::uint8_t, kBlock>;

// For how many of the numbers from 0 to 255 something holds.
template <typename Holds>
HYBRIDPAR_INLINE int count_where(Holds holds) {
    std::array<std::uint8_t, kLanes> counts{};
    for (int k = 0; k < kDepth; ++k)
        for (int j = 0; j < kLanes; ++j)
            counts[j] += holds(kLanes * k + j);
    int total = 0;
    for (int j = 0; j < kLanes; ++j)
        total += counts[j];
    return total;
}

// How many of the bytes are below a limit.
HYBRIDPAR_INLINE int below(const Bytes &bytes, std::uint8_t limit) {
    return count_where([&](int i) { return bytes[i] < limit; });
}

// Which exponents have codes of their own: those from `top` down, as many as there are codes of `width` bits but for
// the reserved ones; all if the width is that of whole exponents.
struct Window {
    int width;
    std::uint8_t top;
};

// Note [windows]
// Nearly always the best window is close below the largest exponent, and a few counts find it. Where many exponents are
// outside the best of those, all windows are looked at: a value of another magnitude among the rest is enough. But not
// where most of them are zero, of values that are so, or nearly, and have no code of their own: no window has them,
// too.
constexpr int kGood = 144;

// The window from which exponents take the fewest bytes, and that number.
struct Choice {
    Window window;
    int bytes;
    // Exponents in all: those of values with a code of their own do not count.
    int total;

    HYBRIDPAR_INLINE void consider(int width, int top, int inside) {
        const int taken = kLanes * width + total - inside;
        if (taken >= bytes) return;
        window = {width, static_cast<std::uint8_t>(top)};
        bytes = taken;
    }
};

// How many exponents there are of each value, and of those below it.
struct Histogram {
    static constexpr int kMost = (1 << kWidest) - 1;

    HYBRIDPAR_INLINE Histogram(const Bytes &exponents, int zeros) {
        // Equal exponents often follow each other, and a count must not wait for the one before it.
        std::array<std::array<std::uint8_t, 256>, 4> counts{};
        for (int i = 0; i < kBlock; i += 4)
            for (int j = 0; j < 4; ++j)
                ++counts[j][exponents[i + j]];
        auto total = static_cast<std::uint16_t>(-zeros);
        for (int i = 0; i < 256; ++i) {
            total = static_cast<std::uint16_t>(total + counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i]);
            until[kMost + i + 1] = total;
        }
    }

    // How many exponents a window of so many codes has that ends at `top`.
    HYBRIDPAR_INLINE int inside(int top, int codes) const {
        return until[kMost + top + 1] - until[kMost + top + 1 - codes];
    }

    // until[kMost + i]: how many are below i, also where i is negative.
    std::array<std::uint16_t, 257 + kMost> until{};
};

HYBRIDPAR_INLINE Window choose_of_all(const Bytes &exponents, int zeros, int narrowest, int reserved, Choice best) {
    const Histogram histogram(exponents, zeros);
    for (int width = narrowest; width <= kWidest; ++width) {
        const int codes = (1 << width) - reserved;
        std::uint16_t most = 0;
        for (int top = 0; top < 256; ++top)
            most = std::max(most, static_cast<std::uint16_t>(histogram.inside(top, codes)));
        if (kLanes * width + best.total - most >= best.bytes) continue;
        int top = 0;
        while (histogram.inside(top, codes) != most)
            ++top;
        best.consider(width, top, most);
    }
    return best.window;
}

// The window with which the block is shortest. See Note [windows]. `zeros` values have a code of their own.
HYBRIDPAR_INLINE Window choose(const Bytes &exponents, int zeros) {
    const int narrowest = zeros > 0 ? kNarrowestSparse : 1, reserved = zeros > 0 ? 2 : 1;
    const int total = static_cast<int>(kBlock) - zeros;
    std::uint8_t top = 0;
    for (int i = 0; i < kBlock; ++i)
        top = std::max(top, exponents[i]);
    Bytes distances;
    for (int i = 0; i < kBlock; ++i)
        distances[i] = static_cast<std::uint8_t>(top - exponents[i]);
    // nearer[d]: how many are less than d below the largest.
    std::array<int, kShifts + (1 << kWidest)> nearer{};
    for (int d = 1; d < static_cast<int>(nearer.size()); ++d)
        nearer[d] = nearer[d - 1] == total ? total : below(distances, static_cast<std::uint8_t>(d)) - (d > top) * zeros;
    if (nearer[1] == kBlock) return {0, top};
    // Whole exponents have no code for zeros. That the others are shorter follows from the number of zeros.
    Choice best{{kWhole, 0}, zeros > 0 ? kLanes * kWidest + total + 1 : total, total};
    for (int width = narrowest; width <= kWidest; ++width)
        for (int shift = 0; shift < std::min<int>(kShifts, top + 1); ++shift)
            best.consider(width, top - shift, nearer[shift + (1 << width) - reserved] - nearer[shift]);
    if (best.bytes <= kGood || (zeros == 0 && best.bytes - below(exponents, 1) <= kGood)) return best.window;
    return choose_of_all(exponents, zeros, narrowest, reserved, best);
}

} // namespace hybridpar::exponents

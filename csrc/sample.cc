#include "sample.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "splitmix.h"

namespace hybridpar {
namespace {

// Numbers in [0, bound), all equally likely (Lemire 2019).
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t below(std::uint64_t bound) {
        auto product = multiplied(bound);
        if (product.low < bound)
            for (const std::uint64_t threshold = (0 - bound) % bound; product.low < threshold;)
                product = multiplied(bound);
        return product.high;
    }

  private:
    struct Product {
        std::uint64_t high, low;
    };

    Product multiplied(std::uint64_t bound) {
        const std::uint64_t random = mixed(state_ += 0x9e3779b97f4a7c15u);
        // Of 64-bit numbers by way of 32-bit halves: no wider type is portable.
        const std::uint64_t a = random >> 32, b = random & 0xffffffffu, c = bound >> 32, d = bound & 0xffffffffu;
        const std::uint64_t low = b * d, cross = a * d + (low >> 32), other = b * c + (cross & 0xffffffffu);
        return {a * c + (cross >> 32) + (other >> 32), random * bound};
    }

    std::uint64_t state_;
};

// Numbers of zero or more; room for twice as many as will be inserted.
class Set {
  public:
    explicit Set(std::int64_t most) {
        std::size_t room = 16;
        while (room < 2 * static_cast<std::size_t>(most))
            room *= 2;
        slots_.assign(room, kEmpty);
    }

    // False if it is there already.
    bool insert(std::int64_t number) {
        const std::size_t mask = slots_.size() - 1;
        for (std::size_t slot = mixed(static_cast<std::uint64_t>(number)) & mask;; slot = (slot + 1) & mask) {
            if (slots_[slot] == number) return false;
            if (slots_[slot] == kEmpty) {
                slots_[slot] = number;
                return true;
            }
        }
    }

  private:
    static constexpr std::int64_t kEmpty = -1;
    std::vector<std::int64_t> slots_;
};

// Ascending. By digits of 11 bits, the lowest first.
void sort(std::vector<std::int64_t> &numbers, std::int64_t bound) {
    constexpr int kBits = 11;
    constexpr std::size_t kDigits = std::size_t{1} << kBits;
    std::vector<std::int64_t> other(numbers.size());
    for (int shift = 0; shift < 63 && (bound >> shift) > 0; shift += kBits) {
        std::size_t places[kDigits + 1] = {};
        const auto digit = [shift](std::int64_t number) {
            return static_cast<std::size_t>(number >> shift) & (kDigits - 1);
        };
        for (const std::int64_t number : numbers)
            ++places[digit(number) + 1];
        for (std::size_t i = 0; i < kDigits; ++i)
            places[i + 1] += places[i];
        for (const std::int64_t number : numbers)
            other[places[digit(number)]++] = number;
        numbers.swap(other);
    }
}

// Of the numbers in [0, size), in no order (Floyd's method).
std::vector<std::int64_t> some_of(std::int64_t size, std::int64_t count, std::uint64_t seed) {
    Random random(mixed(seed));
    Set seen(count);
    std::vector<std::int64_t> drawn(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t last = size - count + i;
        const auto number = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(last) + 1));
        drawn[static_cast<std::size_t>(i)] = seen.insert(number) ? number : (seen.insert(last), last);
    }
    return drawn;
}

} // namespace

void draw_with(const std::int64_t *kept, std::int64_t kept_count, std::int64_t size, std::int64_t count,
               std::uint64_t seed, std::int64_t *result) {
    // First places among the numbers that are not kept.
    const std::int64_t rest = size - kept_count;
    std::vector<std::int64_t> drawn = some_of(rest, count, seed);
    sort(drawn, rest);
    // The place of a number that is not kept grows by the number of kept ones before it.
    std::int64_t before = 0;
    for (const std::int64_t place : drawn) {
        for (; before < kept_count && kept[before] <= place + before; ++before)
            *result++ = kept[before];
        *result++ = place + before;
    }
    std::copy(kept + before, kept + kept_count, result);
}

} // namespace hybridpar

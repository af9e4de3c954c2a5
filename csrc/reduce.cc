#include "reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "clones.h"

namespace hybridpar {
namespace {

// Elements whose results wait in the first-level cache for the next source or target.
constexpr std::int64_t kBlock = 1024;

using Reduce = void (*)(const void *const *sources, std::size_t source_count, void *const *targets,
                        std::size_t target_count, std::int64_t count);

template <typename Value>
using Partial = std::conditional_t<std::is_same_v<Value, BFloat16> || std::is_same_v<Value, Float16>, float, Value>;

template <typename Value>
HYBRIDPAR_INLINE Partial<Value> load(Value value) {
    if constexpr (std::is_same_v<Partial<Value>, Value>)
        return value;
    else
        return to_float(value);
}

template <typename Value>
HYBRIDPAR_INLINE void save(Value &target, Partial<Value> value) {
    if constexpr (std::is_same_v<Partial<Value>, Value>)
        target = value;
    else
        store(target, value);
}

struct Sum {
    template <typename Value>
    static HYBRIDPAR_INLINE Value of(Value a, Value b) {
        if constexpr (std::is_same_v<Value, std::int64_t>)
            return static_cast<Value>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
        else
            return static_cast<Value>(a + b);
    }
};

// x != x holds for a NaN only, which both keep.
struct Max {
    template <typename Value>
    static HYBRIDPAR_INLINE Value of(Value a, Value b) {
        return (a > b) | (a != a) ? a : b;
    }
};

struct Min {
    template <typename Value>
    static HYBRIDPAR_INLINE Value of(Value a, Value b) {
        return (a < b) | (a != a) ? a : b;
    }
};

// target[i] = first[i] (+) rest[i] (+) ... The target may be one of the sources.
template <typename Combine, typename Target, typename First, typename... Rest>
HYBRIDPAR_INLINE void combine(std::int64_t count, Target *target, const First *first, const Rest *...rest) {
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t i = 0; i < count; ++i) {
        auto value = load(first[i]);
        ((value = Combine::of(value, load(rest[i]))), ...);
        save(target[i], value);
    }
}

// Two neighbours in one word, of which one half each is a float32: so no value has to change its place in a vector.
struct Pair {
    std::uint32_t bits;

    static HYBRIDPAR_INLINE Pair at(const BFloat16 *values) {
        Pair pair;
        std::memcpy(&pair, values, sizeof(pair));
        return pair;
    }
    HYBRIDPAR_INLINE float lower() const {
        return bit_cast<float>(bits << 16);
    }
    HYBRIDPAR_INLINE float upper() const {
        return bit_cast<float>(bits & 0xffff0000u);
    }
};

template <typename Combine, typename... Rest>
HYBRIDPAR_INLINE void combine(std::int64_t count, BFloat16 *target, const BFloat16 *first, const BFloat16 *second,
                              const Rest *...rest) {
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t i = 0; i + 1 < count; i += 2) {
        const auto fold = [&](auto half) {
            float value = Combine::of(half(Pair::at(first + i)), half(Pair::at(second + i)));
            ((value = Combine::of(value, half(Pair::at(rest + i)))), ...);
            return round_to_upper_half(value);
        };
        const std::uint32_t lower = fold([](Pair pair) { return pair.lower(); });
        const std::uint32_t upper = fold([](Pair pair) { return pair.upper(); });
        const Pair result{(upper & 0xffff0000u) | lower >> 16};
        std::memcpy(target + i, &result, sizeof(result));
    }
    if (count % 2 == 0) return;
    float value = Combine::of(load(first[count - 1]), load(second[count - 1]));
    ((value = Combine::of(value, load(rest[count - 1]))), ...);
    save(target[count - 1], value);
}

HYBRIDPAR_INLINE void copy_by_lines(void *target, const void *source, std::size_t bytes) {
    constexpr std::size_t step = 256;
    auto *to = static_cast<unsigned char *>(target);
    const auto *from = static_cast<const unsigned char *>(source);
    std::size_t done = 0;
#if defined(__GNUC__)
    typedef std::uint64_t Vector __attribute__((vector_size(64)));
    for (; done + step <= bytes; done += step) {
        // Copies of constant size become plain loads and stores, whatever the alignment.
        Vector lines[4];
        for (int i = 0; i < 4; ++i)
            std::memcpy(&lines[i], from + done + i * sizeof(Vector), sizeof(Vector));
        for (int i = 0; i < 4; ++i)
            std::memcpy(to + done + i * sizeof(Vector), &lines[i], sizeof(Vector));
        __asm__ __volatile__("" ::: "memory"); // or the compiler calls memcpy after all
    }
#endif
    std::memcpy(to + done, from + done, bytes - done);
}

template <typename Combine, typename Value>
HYBRIDPAR_INLINE void reduce_all(const void *const *sources, std::size_t source_count, void *const *targets,
                                 std::size_t target_count, std::int64_t count) {
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
        const std::int64_t length = std::min(kBlock, count - begin);
        const auto source = [&](std::size_t s) { return static_cast<const Value *>(sources[s]) + begin; };
        Value *target = static_cast<Value *>(targets[0]) + begin;
        // The conversions of float16 are long: compilers make better code of one at a time.
        switch (std::is_same_v<Value, Float16> ? 0 : source_count) {
        case 1: combine<Combine>(length, target, source(0)); break;
        case 2: combine<Combine>(length, target, source(0), source(1)); break;
        case 3: combine<Combine>(length, target, source(0), source(1), source(2)); break;
        case 4: combine<Combine>(length, target, source(0), source(1), source(2), source(3)); break;
        default:
            alignas(64) Partial<Value> partial[kBlock], next[kBlock];
            const auto widened = [&](std::size_t s) -> const Partial<Value> * {
                if constexpr (std::is_same_v<Partial<Value>, Value>) {
                    return source(s);
                } else {
                    combine<Combine>(length, next, source(s));
                    return next;
                }
            };
            combine<Combine>(length, partial, source(0));
            for (std::size_t s = 1; s < source_count; ++s)
                combine<Combine>(length, partial, partial, widened(s));
            combine<Combine>(length, target, partial);
        }
        for (std::size_t t = 1; t < target_count; ++t)
            copy_by_lines(static_cast<Value *>(targets[t]) + begin, target, length * sizeof(Value));
    }
}

#define HYBRIDPAR_REDUCE(name, Combine, Value)                                                             \
    HYBRIDPAR_CLONES void name(const void *const *sources, std::size_t source_count, void *const *targets, \
                               std::size_t target_count, std::int64_t count) {                             \
        reduce_all<Combine, Value>(sources, source_count, targets, target_count, count);                   \
    }

HYBRIDPAR_REDUCE(sum_float32, Sum, float)
HYBRIDPAR_REDUCE(sum_float64, Sum, double)
HYBRIDPAR_REDUCE(sum_bfloat16, Sum, BFloat16)
HYBRIDPAR_REDUCE(sum_float16, Sum, Float16)
HYBRIDPAR_REDUCE(sum_int64, Sum, std::int64_t)
HYBRIDPAR_REDUCE(sum_uint8, Sum, std::uint8_t)
HYBRIDPAR_REDUCE(max_float32, Max, float)
HYBRIDPAR_REDUCE(max_float64, Max, double)
HYBRIDPAR_REDUCE(max_bfloat16, Max, BFloat16)
HYBRIDPAR_REDUCE(max_float16, Max, Float16)
HYBRIDPAR_REDUCE(max_int64, Max, std::int64_t)
HYBRIDPAR_REDUCE(max_uint8, Max, std::uint8_t)
HYBRIDPAR_REDUCE(min_float32, Min, float)
HYBRIDPAR_REDUCE(min_float64, Min, double)
HYBRIDPAR_REDUCE(min_bfloat16, Min, BFloat16)
HYBRIDPAR_REDUCE(min_float16, Min, Float16)
HYBRIDPAR_REDUCE(min_int64, Min, std::int64_t)
HYBRIDPAR_REDUCE(min_uint8, Min, std::uint8_t)

// Rows in the order of Reduction, columns in that of DType.
constexpr std::array<std::array<Reduce, kReducedDTypes>, kReductions> kReduce = {{
    {sum_float32, sum_float64, sum_bfloat16, sum_float16, sum_int64, sum_uint8},
    {max_float32, max_float64, max_bfloat16, max_float16, max_int64, max_uint8},
    {min_float32, min_float64, min_bfloat16, min_float16, min_int64, min_uint8},
}};

} // namespace

HYBRIDPAR_CLONES void copy_shared(void *target, const void *source, std::size_t bytes) {
    copy_by_lines(target, source, bytes);
}

void spread(void *const *targets, std::size_t target_count, const void *source, std::size_t bytes) {
    constexpr std::size_t step = 4096; // which the first-level cache keeps from one target to the next
    for (std::size_t begin = 0; begin < bytes; begin += step) {
        const auto *from = static_cast<const std::byte *>(source) + begin;
        for (std::size_t t = 0; t < target_count; ++t)
            copy_shared(static_cast<std::byte *>(targets[t]) + begin, from, std::min(step, bytes - begin));
    }
}

void reduce(const void *const *sources, std::size_t source_count, void *const *targets, std::size_t target_count,
            std::int64_t count, DType dtype, Reduction reduction) {
    kReduce[static_cast<std::size_t>(reduction)][static_cast<std::size_t>(dtype)](sources, source_count, targets,
                                                                                  target_count, count);
}

} // namespace hybridpar

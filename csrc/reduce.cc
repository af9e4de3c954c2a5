#include "reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "clones.h"

namespace hybridpar {
namespace {

// Elements whose partial results wait in the first-level cache for the next source.
constexpr std::int64_t kBlock = 512;

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

template <typename Combine, typename Value>
HYBRIDPAR_INLINE void reduce_all(const void *const *sources, std::size_t source_count, void *const *targets,
                                 std::size_t target_count, std::int64_t count) {
    alignas(64) Partial<Value> partial[kBlock];
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
        const std::int64_t length = std::min(kBlock, count - begin);
        const Value *first = static_cast<const Value *>(sources[0]) + begin;
        if (source_count == 1) {
            for (std::int64_t i = 0; i < length; ++i)
                partial[i] = load(first[i]);
        } else {
            const Value *second = static_cast<const Value *>(sources[1]) + begin;
            for (std::int64_t i = 0; i < length; ++i)
                partial[i] = Combine::of(load(first[i]), load(second[i]));
        }
        for (std::size_t s = 2; s < source_count; ++s) {
            const Value *next = static_cast<const Value *>(sources[s]) + begin;
            for (std::int64_t i = 0; i < length; ++i)
                partial[i] = Combine::of(partial[i], load(next[i]));
        }
        Value *target = static_cast<Value *>(targets[0]) + begin;
        for (std::int64_t i = 0; i < length; ++i)
            save(target[i], partial[i]);
        for (std::size_t t = 1; t < target_count; ++t)
            std::memcpy(static_cast<Value *>(targets[t]) + begin, target, length * sizeof(Value));
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

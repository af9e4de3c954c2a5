#include "margin_softmax.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "clones.h"
#include "exponential.h"
#include "parallel.h"

namespace hybridpar {
namespace {

// Samples that one thread takes through a chunk: what belongs to them stays in registers and the nearest cache.
constexpr std::int64_t kSamples = 64;
// Terms that are added up in a float before the sum goes into a double.
constexpr std::int64_t kTerms = 64;

template <typename Product>
using ExactOf = std::conditional_t<std::is_same_v<Product, double>, double, float>;

HYBRIDPAR_INLINE double to_exact(double value) {
    return value;
}
template <typename Product>
HYBRIDPAR_INLINE float to_exact(Product value) {
    return to_float(value);
}
HYBRIDPAR_INLINE void store_exact(double &target, double value) {
    target = value;
}
template <typename Product>
HYBRIDPAR_INLINE void store_exact(Product &target, float value) {
    store(target, value);
}

// The samples [begin, end) of a chunk, class by class.
template <typename Product>
struct Samples {
    using Exact = ExactOf<Product>;

    const Chunk &chunk;
    const OwnSamples &own;
    std::int64_t begin, count;

    HYBRIDPAR_INLINE std::int64_t place(std::int64_t c) const {
        return c * chunk.batch + begin;
    }
    HYBRIDPAR_INLINE Exact inverse_norm(std::int64_t c) const {
        return chunk.inverse_norms == nullptr ? Exact{1} : static_cast<const Exact *>(chunk.inverse_norms)[c];
    }
    HYBRIDPAR_INLINE void logits(std::int64_t c, Exact *result) const {
        const auto scale = static_cast<Exact>(chunk.scale);
        const Exact factor = scale * inverse_norm(c);
        const Exact shift = chunk.bias == nullptr ? Exact{0} : scale * static_cast<const Exact *>(chunk.bias)[c];
        const Product *products = static_cast<const Product *>(chunk.products) + place(c);
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t b = 0; b < count; ++b)
            result[b] = to_exact(products[b]) * factor + shift;
    }
    // Calls use(sample, value) for the own samples of class c among these; `next` is the place of the first one that
    // may be of class c, and moves on.
    template <typename Use>
    HYBRIDPAR_INLINE void each_own(std::int64_t c, std::int64_t &next, Use use) const {
        for (; next < own.count && own.classes[next] == c; ++next) {
            const std::int64_t sample = own.samples[next] - begin;
            if (sample >= 0 && sample < count) use(sample, static_cast<const Exact *>(own.values)[next]);
        }
    }
};

template <typename Product>
HYBRIDPAR_INLINE void exponentials_of(const Samples<Product> &samples, void *weights, void *maximum_of_all,
                                      void *total_of_all, void *rescale_of_all) {
    using Exact = ExactOf<Product>;
    constexpr Exact kNone = -std::numeric_limits<Exact>::infinity();
    const std::int64_t count = samples.count, classes = samples.chunk.classes;
    auto *maximum = static_cast<Exact *>(maximum_of_all) + samples.begin;
    auto *total = static_cast<Exact *>(total_of_all) + samples.begin;
    auto *rescale = static_cast<Exact *>(rescale_of_all) + samples.begin;
    alignas(64) Exact logits[kSamples], highest[kSamples], terms[kSamples];
    alignas(64) double sums[kSamples] = {};

    std::copy_n(maximum, count, highest);
    std::int64_t next = 0;
    for (std::int64_t c = 0; c < classes; ++c) {
        samples.logits(c, logits);
        samples.each_own(c, next, [&](std::int64_t b, Exact value) { logits[b] = value; });
        for (std::int64_t b = 0; b < count; ++b)
            highest[b] = highest[b] < logits[b] ? logits[b] : highest[b];
    }
    for (std::int64_t b = 0; b < count; ++b) {
        // Nothing seen yet: -inf minus itself would be no number.
        rescale[b] = maximum[b] == highest[b] ? Exact{1} : exponential(maximum[b] - highest[b]);
        maximum[b] = highest[b];
        highest[b] = highest[b] == kNone ? Exact{0} : highest[b];
        terms[b] = 0;
    }
    next = 0;
    for (std::int64_t c = 0; c < classes; ++c) {
        const Exact factor = samples.inverse_norm(c);
        Product *result = static_cast<Product *>(weights) + samples.place(c);
        samples.logits(c, logits);
        const std::int64_t first_own = next;
        samples.each_own(c, next, [&](std::int64_t b, Exact value) { logits[b] = value; });
        for (std::int64_t b = 0; b < count; ++b) {
            const Exact value = exponential(logits[b] - highest[b]);
            terms[b] += value;
            store_exact(result[b], value * factor);
        }
        if (next != first_own) {
            std::int64_t again = first_own;
            samples.each_own(c, again, [&](std::int64_t b, Exact) { store_exact(result[b], Exact{0}); });
        }
        if (c % kTerms == kTerms - 1 || c == classes - 1)
            for (std::int64_t b = 0; b < count; ++b) {
                sums[b] += static_cast<double>(terms[b]);
                terms[b] = 0;
            }
    }
    for (std::int64_t b = 0; b < count; ++b)
        total[b] = static_cast<Exact>(static_cast<double>(total[b]) * static_cast<double>(rescale[b]) + sums[b]);
}

template <typename Product>
HYBRIDPAR_INLINE void probabilities_of(const Samples<Product> &samples, void *probabilities, const void *maximum_of_all,
                                       const void *log_total_of_all, const void *counts_of_all,
                                       ExactOf<Product> *sums) {
    using Exact = ExactOf<Product>;
    const std::int64_t count = samples.count;
    const auto *maximum = static_cast<const Exact *>(maximum_of_all) + samples.begin;
    const auto *log_total = static_cast<const Exact *>(log_total_of_all) + samples.begin;
    const auto *counts = static_cast<const Exact *>(counts_of_all) + samples.begin;
    alignas(64) Exact values[kSamples];
    std::int64_t next = 0;
    for (std::int64_t c = 0; c < samples.chunk.classes; ++c) {
        samples.logits(c, values);
        for (std::int64_t b = 0; b < count; ++b)
            values[b] = exponential((values[b] - maximum[b]) - log_total[b]) * counts[b];
        samples.each_own(c, next, [&](std::int64_t b, Exact value) { values[b] = value; });
        Product *result = static_cast<Product *>(probabilities) + samples.place(c);
        for (std::int64_t b = 0; b < count; ++b)
            store_exact(result[b], values[b]);
        if (sums == nullptr) continue;
        double sum = 0;
        for (std::int64_t b = 0; b < count; ++b)
            sum += static_cast<double>(values[b]);
        sums[c] += static_cast<Exact>(sum);
    }
}

using Exponentials = void (*)(const Chunk &, const OwnSamples &, std::int64_t begin, std::int64_t count, void *weights,
                              void *maximum, void *total, void *rescale);
using Probabilities = void (*)(const Chunk &, const OwnSamples &, std::int64_t begin, std::int64_t count,
                               void *probabilities, const void *maximum, const void *log_total, const void *counts,
                               void *sums);

#define HYBRIDPAR_SOFTMAX(suffix, Product)                                                                      \
    HYBRIDPAR_CLONES void exponentials_##suffix(const Chunk &chunk, const OwnSamples &own, std::int64_t begin,  \
                                                std::int64_t count, void *weights, void *maximum, void *total,  \
                                                void *rescale) {                                                \
        exponentials_of<Product>({chunk, own, begin, count}, weights, maximum, total, rescale);                 \
    }                                                                                                           \
    HYBRIDPAR_CLONES void probabilities_##suffix(const Chunk &chunk, const OwnSamples &own, std::int64_t begin, \
                                                 std::int64_t count, void *probabilities, const void *maximum,  \
                                                 const void *log_total, const void *counts, void *sums) {       \
        probabilities_of<Product>({chunk, own, begin, count}, probabilities, maximum, log_total, counts,        \
                                  static_cast<ExactOf<Product> *>(sums));                                       \
    }

HYBRIDPAR_SOFTMAX(float32, float)
HYBRIDPAR_SOFTMAX(float64, double)
HYBRIDPAR_SOFTMAX(bfloat16, BFloat16)
HYBRIDPAR_SOFTMAX(float16, Float16)

// In the order of DType.
constexpr std::array<Exponentials, kDTypes> kExponentials = {exponentials_float32, exponentials_float64,
                                                             exponentials_bfloat16, exponentials_float16};
constexpr std::array<Probabilities, kDTypes> kProbabilities = {probabilities_float32, probabilities_float64,
                                                               probabilities_bfloat16, probabilities_float16};

std::int64_t blocks(std::int64_t batch) {
    return (batch + kSamples - 1) / kSamples;
}

} // namespace

void add_exponentials(const Chunk &chunk, const OwnSamples &own, void *weights, void *maximum, void *total,
                      void *rescale, std::int64_t threads) {
    const auto function = kExponentials[static_cast<std::size_t>(chunk.dtype)];
    in_parallel(blocks(chunk.batch), threads, [&](std::int64_t block) {
        const std::int64_t begin = block * kSamples;
        function(chunk, own, begin, std::min(kSamples, chunk.batch - begin), weights, maximum, total, rescale);
    });
}

void to_probabilities(const Chunk &chunk, const OwnSamples &own, void *probabilities, const void *maximum,
                      const void *log_total, const void *counts, void *sums, std::int64_t threads) {
    const auto function = kProbabilities[static_cast<std::size_t>(chunk.dtype)];
    if (sums != nullptr)
        std::memset(sums, 0, static_cast<std::size_t>(chunk.classes) * (chunk.dtype == DType::float64 ? 8 : 4));
    // Sums over samples are added up block by block: one thread keeps their order.
    in_parallel(blocks(chunk.batch), sums == nullptr ? threads : 1, [&](std::int64_t block) {
        const std::int64_t begin = block * kSamples;
        function(chunk, own, begin, std::min(kSamples, chunk.batch - begin), probabilities, maximum, log_total, counts,
                 sums);
    });
}

} // namespace hybridpar

// add_exponentials and to_probabilities of margin_softmax.h on a CUDA device. Compiled at run time by
// hybridpar/kernels/cuda.py, with no header but those of this folder.
//
// add_exponentials takes three launches: the maxima of each segment; with the maximum of all, the exponentials and
// their sums over each segment; then the new maximum and total of each sample. So a chunk is read twice; where it fits
// into the device's cache, it comes from there.
#include "tiles.h"

namespace hybridpar::cuda {

template <typename Product, int kWidth>
__device__ inline void find_maxima(const Chunk &chunk, const OwnSamples &own, const Division &division,
                                   ExactOf<Product> *maxima) {
    using Exact = ExactOf<Product>;
    __shared__ OwnClasses<Exact, kWidth> all_own;
    each_part<kWidth>(chunk, division, [&](const Samples<kWidth> &samples, Index segment, Index begin, Index end) {
        all_own.fill(own, begin, end, samples);
        const MyOwn<Exact, kWidth> mine(all_own);
        Exact highest[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            highest[i] = none<Exact>();
        each_class<Product>(chunk, samples, begin, end, [&](Index c, const Vector<Product, kWidth> &products) {
            const ClassFactors<Exact> factors(chunk, c);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const Exact logit = factors.logit(products.values[i]);
                highest[i] = Higher{}(highest[i], mine.classes[i] == c ? mine.values[i] : logit);
            }
        });
        over_warps(highest, Higher{});
        write_part(highest, samples, segment * chunk.batch, maxima);
    });
}

// The maximum of the logits of a thread's samples so far, those of this chunk included; by the whole block.
template <typename Exact, int kWidth>
__device__ inline void load_maximum(const Chunk &chunk, const Samples<kWidth> &samples, const Division &division,
                                    const Exact *before, const Exact *maxima, Exact (&highest)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
        highest[i] = none<Exact>();
    samples.load(before, highest);
#pragma unroll 4
    for (Index segment = warp(); segment < division.segments; segment += warps()) {
        Exact found[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            found[i] = none<Exact>();
        samples.load(maxima + segment * chunk.batch, found);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            highest[i] = Higher{}(highest[i], found[i]);
    }
    over_warps(highest, Higher{});
}

template <typename Product, typename Out, int kWidth>
__device__ inline void write_exponentials(const Chunk &chunk, const OwnSamples &own, const Division &division,
                                          Out *weights, const ExactOf<Product> *maximum, ExactOf<Product> *parts) {
    using Exact = ExactOf<Product>;
    __shared__ OwnClasses<Exact, kWidth> all_own;
    const Exact *maxima = parts;
    Exact *sums = parts + division.segments * chunk.batch;
    each_part<kWidth>(chunk, division, [&](const Samples<kWidth> &samples, Index segment, Index begin, Index end) {
        Exact highest[kWidth], terms[kWidth];
        load_maximum(chunk, samples, division, maximum, maxima, highest);
        all_own.fill(own, begin, end, samples);
        const MyOwn<Exact, kWidth> mine(all_own);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            // Nothing seen yet: -inf minus itself would be no number.
            highest[i] = highest[i] == none<Exact>() ? Exact{0} : highest[i];
            terms[i] = 0;
        }
        each_class<Product>(chunk, samples, begin, end, [&](Index c, const Vector<Product, kWidth> &products) {
            const ClassFactors<Exact> factors(chunk, c);
            const Exact norm = inverse_norm<Exact>(chunk, c);
            Vector<Out, kWidth> result;
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const bool is_own = mine.classes[i] == c;
                const Exact logit = is_own ? mine.values[i] : factors.logit(products.values[i]);
                const Exact value = exponential(logit - highest[i]);
                terms[i] += value;
                narrow(is_own ? Exact{0} : value * norm, result.values[i]);
            }
            *reinterpret_cast<Vector<Out, kWidth> *>(weights + c * chunk.batch + samples.mine) = result;
        });
        over_warps(terms, Plus{});
        write_part(terms, samples, segment * chunk.batch, sums);
    });
}

template <typename Exact>
__device__ inline void finish_exponentials(Index batch, const Division &division, const Exact *parts, Exact *maximum,
                                           Exact *total, Exact *rescale) {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index b = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; b < batch; b += threads) {
        Exact highest = maximum[b];
        double sum = 0;
#pragma unroll 4
        for (Index segment = 0; segment < division.segments; ++segment) {
            highest = Higher{}(highest, parts[segment * batch + b]);
            sum += static_cast<double>(parts[(division.segments + segment) * batch + b]);
        }
        const Exact factor = maximum[b] == highest ? Exact{1} : exponential(maximum[b] - highest);
        total[b] = static_cast<Exact>(static_cast<double>(total[b]) * static_cast<double>(factor) + sum);
        maximum[b] = highest;
        rescale[b] = factor;
    }
}

// What belongs to the samples of one thread.
template <typename Exact, int kWidth>
struct Probability {
    Exact maximum[kWidth], log_total[kWidth], counts[kWidth];

    __device__ Probability(const Samples<kWidth> &samples, const void *maximum_of_all, const void *log_total_of_all,
                           const void *counts_of_all) {
        samples.load(maximum_of_all, maximum);
        samples.load(log_total_of_all, log_total);
        samples.load(counts_of_all, counts);
    }
    // Writes those of one class, and returns their sum.
    template <typename Product, typename Out>
    __device__ Exact write(const Chunk &chunk, Index c, const Vector<Product, kWidth> &products,
                           const MyOwn<Exact, kWidth> &own, Out *target) const {
        const ClassFactors<Exact> factors(chunk, c);
        Vector<Out, kWidth> result;
        Exact sum = 0;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const Exact logit = factors.logit(products.values[i]);
            const Exact value = exponential((logit - maximum[i]) - log_total[i]) * counts[i];
            const Exact chosen = own.classes[i] == c ? own.values[i] : value;
            sum += chosen;
            narrow(chosen, result.values[i]);
        }
        *reinterpret_cast<Vector<Out, kWidth> *>(target) = result;
        return sum;
    }
};

template <typename Product, typename Out, int kWidth>
__device__ inline void write_probabilities(const Chunk &chunk, const OwnSamples &own, const Division &division,
                                           Out *out, const void *maximum, const void *log_total, const void *counts) {
    using Exact = ExactOf<Product>;
    __shared__ OwnClasses<Exact, kWidth> all_own;
    each_part<kWidth>(chunk, division, [&](const Samples<kWidth> &samples, Index, Index begin, Index end) {
        all_own.fill(own, begin, end, samples);
        const MyOwn<Exact, kWidth> mine(all_own);
        const Probability<Exact, kWidth> probability(samples, maximum, log_total, counts);
        each_class<Product>(chunk, samples, begin, end, [&](Index c, const Vector<Product, kWidth> &products) {
            probability.write(chunk, c, products, mine, out + c * chunk.batch + samples.mine);
        });
    });
}

// With sums over the samples of each class: a warp takes all tiles of its class, one after the other.
template <typename Product, typename Out, int kWidth>
__device__ inline void write_and_sum_probabilities(const Chunk &chunk, const OwnSamples &own, Out *out,
                                                   const void *maximum, const void *log_total, const void *counts,
                                                   ExactOf<Product> *sums) {
    using Exact = ExactOf<Product>;
    __shared__ OwnClasses<Exact, kWidth> all_own;
    const Index tiles = Samples<kWidth>::tiles(chunk.batch);
#pragma unroll 1
    for (Index begin = static_cast<Index>(blockIdx.x) * warps(); begin < chunk.classes;
         begin += static_cast<Index>(gridDim.x) * warps()) {
        const Index c = begin + warp();
        Exact sum = 0;
#pragma unroll 1
        for (Index tile = 0; tile < tiles; ++tile) {
            const Samples<kWidth> samples(tile, chunk.batch);
            all_own.fill(own, begin, begin + warps(), samples);
            const MyOwn<Exact, kWidth> mine(all_own);
            if (c >= chunk.classes || !samples.inside) continue;
            const Probability<Exact, kWidth> probability(samples, maximum, log_total, counts);
            const Index place = c * chunk.batch + samples.mine;
            const auto products = *reinterpret_cast<const Vector<Product, kWidth> *>(
                static_cast<const Product *>(chunk.products) + place);
            sum += probability.write(chunk, c, products, mine, out + place);
        }
        sum = warp_sum(sum);
        if (c < chunk.classes && lane() == 0) sums[c] = sum;
    }
}

// Every kernel takes: the chunk and the samples whose own class is in it, as margin_softmax.h has them; where results
// go; maximum; total or log_total; rescale or counts; sums or null; memory for what blocks find out, [2, segments,
// batch]; and Note [tiles] the classes of a segment and how many there are. What it does not use may be anything.
#define HYBRIDPAR_PARAMETERS                                                                                   \
    const void *products, long long classes, long long batch, const void *inverse_norms, const void *bias,     \
        double scale, long long own_count, const long long *own_classes, const long long *own_samples,         \
        const void *own_values, void *out, void *maximum, void *total, void *factors, void *sums, void *parts, \
        long long segment_classes, long long segments
#define HYBRIDPAR_INPUTS                                                     \
    const Chunk chunk{products, classes, batch, inverse_norms, bias, scale}; \
    const OwnSamples own{own_count, own_classes, own_samples, own_values};   \
    const Division division = {segment_classes, segments}

#define HYBRIDPAR_FIND_MAXIMA(name, Product, kWidth)                                                \
    HYBRIDPAR_KERNEL(kBlocksAtOnce<Product>) name(HYBRIDPAR_PARAMETERS) {                           \
        HYBRIDPAR_INPUTS;                                                                           \
        find_maxima<Product, kWidth>(chunk, own, division, static_cast<ExactOf<Product> *>(parts)); \
    }
#define HYBRIDPAR_WRITE_EXPONENTIALS(name, Product, Out, kWidth)                                \
    HYBRIDPAR_KERNEL(kBlocksAtOnce<Product>) name(HYBRIDPAR_PARAMETERS) {                       \
        HYBRIDPAR_INPUTS;                                                                       \
        write_exponentials<Product, Out, kWidth>(chunk, own, division, static_cast<Out *>(out), \
                                                 static_cast<ExactOf<Product> *>(maximum),      \
                                                 static_cast<ExactOf<Product> *>(parts));       \
    }
#define HYBRIDPAR_FINISH_EXPONENTIALS(name, Exact)                                                 \
    HYBRIDPAR_KERNEL(1) name(HYBRIDPAR_PARAMETERS) {                                               \
        finish_exponentials(batch, {segment_classes, segments}, static_cast<const Exact *>(parts), \
                            static_cast<Exact *>(maximum), static_cast<Exact *>(total),            \
                            static_cast<Exact *>(factors));                                        \
    }
#define HYBRIDPAR_WRITE_PROBABILITIES(name, Product, Out, kWidth)                                                    \
    HYBRIDPAR_KERNEL(kBlocksAtOnce<Product>) name(HYBRIDPAR_PARAMETERS) {                                            \
        HYBRIDPAR_INPUTS;                                                                                            \
        if (sums == nullptr)                                                                                         \
            write_probabilities<Product, Out, kWidth>(chunk, own, division, static_cast<Out *>(out), maximum, total, \
                                                      factors);                                                      \
        else                                                                                                         \
            write_and_sum_probabilities<Product, Out, kWidth>(chunk, own, static_cast<Out *>(out), maximum, total,   \
                                                              factors, static_cast<ExactOf<Product> *>(sums));       \
    }

// For tiles that are 32 and 128 samples wide.
#define HYBRIDPAR_MAXIMA(name, Product)         \
    HYBRIDPAR_FIND_MAXIMA(name##_1, Product, 1) \
    HYBRIDPAR_FIND_MAXIMA(name##_4, Product, 4)
#define HYBRIDPAR_RESULTS(names, Product, Out)                                \
    HYBRIDPAR_WRITE_EXPONENTIALS(exponentials_##names##_1, Product, Out, 1)   \
    HYBRIDPAR_WRITE_EXPONENTIALS(exponentials_##names##_4, Product, Out, 4)   \
    HYBRIDPAR_WRITE_PROBABILITIES(probabilities_##names##_1, Product, Out, 1) \
    HYBRIDPAR_WRITE_PROBABILITIES(probabilities_##names##_4, Product, Out, 4)

HYBRIDPAR_MAXIMA(maxima_float32, float)
HYBRIDPAR_MAXIMA(maxima_float64, double)
HYBRIDPAR_MAXIMA(maxima_bfloat16, BFloat16)
HYBRIDPAR_MAXIMA(maxima_float16, Float16)
HYBRIDPAR_RESULTS(float32_to_float32, float, float)
HYBRIDPAR_RESULTS(float32_to_bfloat16, float, BFloat16)
HYBRIDPAR_RESULTS(float32_to_float16, float, Float16)
HYBRIDPAR_RESULTS(float64_to_float64, double, double)
HYBRIDPAR_RESULTS(bfloat16_to_bfloat16, BFloat16, BFloat16)
HYBRIDPAR_RESULTS(float16_to_float16, Float16, Float16)
HYBRIDPAR_FINISH_EXPONENTIALS(finish_float32, float)
HYBRIDPAR_FINISH_EXPONENTIALS(finish_float64, double)

} // namespace hybridpar::cuda

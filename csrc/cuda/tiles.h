#pragma once

#include "threads.h"
#include "values.h"

// Note [tiles]
// A chunk [classes, batch] is cut into tiles of samples, as wide as a warp reads at once, and those into segments of
// classes. A block takes one segment of a tile: each of its warps every so many-th class, each thread the same few
// samples throughout, so that what belongs to a sample stays in registers, and neighbouring threads touch neighbouring
// memory. What blocks find out about the same sample is written side by side and put together by whoever needs it, in
// the order of the segments: the same bits in every run. Nothing is left on the device from launch to launch.
namespace hybridpar::cuda {

template <typename Product>
using ExactOf = typename Common<Product, Product>::Type;

// Classes that a warp has on their way at once.
constexpr int kAtOnce = 4;
// Blocks that a multiprocessor must have room for, which limits their registers.
template <typename Product>
constexpr int kBlocksAtOnce = sizeof(Product) == 8 ? 1 : 2;

struct Chunk {
    const void *products;
    Index classes, batch;
    const void *inverse_norms, *bias;
    double scale;
};

struct OwnSamples {
    Index count;
    const Index *classes, *samples;
    const void *values;
};

struct Division {
    Index segment_classes, segments;
};

__device__ inline float exponential(float value) {
    return expf(value);
}
__device__ inline double exponential(double value) {
    return exp(value);
}

template <typename Exact>
__device__ inline Exact none() {
    return -static_cast<Exact>(float_of_bits(0x7f800000u));
}

template <typename Exact>
__device__ inline Exact inverse_norm(const Chunk &chunk, Index c) {
    return chunk.inverse_norms == nullptr ? Exact{1} : static_cast<const Exact *>(chunk.inverse_norms)[c];
}

// What makes logits of the products of one class.
template <typename Exact>
struct ClassFactors {
    Exact factor, shift;

    __device__ ClassFactors(const Chunk &chunk, Index c) {
        const auto scale = static_cast<Exact>(chunk.scale);
        factor = scale * inverse_norm<Exact>(chunk, c);
        shift = chunk.bias == nullptr ? Exact{0} : scale * static_cast<const Exact *>(chunk.bias)[c];
    }
    template <typename Product>
    __device__ Exact logit(Product value) const {
        Exact wide;
        widen(value, wide);
        return wide * factor + shift;
    }
};

// The samples of one thread, and of its block, in the tile that begins with sample `first`.
template <int kWidth>
struct Samples {
    static constexpr int kColumns = kWarp * kWidth;
    Index first, mine;
    bool inside; // all of the thread's, or none: the batch is a multiple of kWidth

    __device__ Samples(Index tile, Index batch)
        : first(tile * kColumns), mine(first + lane() * kWidth), inside(mine < batch) {}
    __device__ static Index tiles(Index batch) {
        return (batch + kColumns - 1) / kColumns;
    }
    template <typename Value>
    __device__ void load(const void *of_all, Value (&values)[kWidth]) const {
        if (!inside) return;
        const auto loaded = *reinterpret_cast<const Vector<Value, kWidth> *>(static_cast<const Value *>(of_all) + mine);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            values[i] = loaded.values[i];
    }
};

// Which of the samples of a tile have their own class among those of a block, and what stands there.
template <typename Exact, int kWidth>
struct OwnClasses {
    static constexpr int kColumns = Samples<kWidth>::kColumns;
    Index classes[kColumns];
    Exact values[kColumns];

    // By the whole block, which may have used it before.
    __device__ void fill(const OwnSamples &own, Index begin, Index end, const Samples<kWidth> &samples) {
        __syncthreads();
        for (int i = threadIdx.x; i < kColumns; i += blockDim.x)
            classes[i] = -1;
        __syncthreads();
        Index low = 0, high = own.count;
        while (low < high) {
            const Index middle = low + (high - low) / 2;
            if (own.classes[middle] < begin)
                low = middle + 1;
            else
                high = middle;
        }
        for (Index i = low + threadIdx.x; i < own.count && own.classes[i] < end; i += blockDim.x) {
            const Index sample = own.samples[i] - samples.first;
            if (sample < 0 || sample >= kColumns) continue;
            classes[sample] = own.classes[i];
            values[sample] = static_cast<const Exact *>(own.values)[i];
        }
        __syncthreads();
    }
};

// Those of one thread, in registers.
template <typename Exact, int kWidth>
struct MyOwn {
    Index classes[kWidth];
    Exact values[kWidth];

    __device__ explicit MyOwn(const OwnClasses<Exact, kWidth> &all) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            classes[i] = all.classes[lane() * kWidth + i];
            values[i] = all.values[lane() * kWidth + i];
        }
    }
};

// Calls use(class, products) for the classes [begin, end) that are this warp's. A thread reads several before it uses
// any, so that `use` may write where the products are.
template <typename Product, int kWidth, typename Use>
__device__ inline void each_class(const Chunk &chunk, const Samples<kWidth> &samples, Index begin, Index end, Use use) {
    using Loaded = Vector<Product, kWidth>;
    if (!samples.inside) return;
    const auto *products = static_cast<const Product *>(chunk.products) + samples.mine;
    const int step = warps();
#pragma unroll 1
    for (Index c = begin + warp(); c < end; c += kAtOnce * step) {
        Loaded loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (c + i * step < end)
                loaded[i] = *reinterpret_cast<const Loaded *>(products + (c + i * step) * chunk.batch);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (c + i * step < end) use(c + i * step, loaded[i]);
    }
}

// Puts together what the warps of a block have about the same samples. All threads return with the result.
template <typename Exact, int kWidth, typename Combine>
__device__ inline void over_warps(Exact (&values)[kWidth], Combine combine) {
    __shared__ Exact memory[kMostWarps][kWarp * kWidth];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
        memory[warp()][lane() * kWidth + i] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        Exact result = memory[0][lane() * kWidth + i];
        for (int other = 1; other < warps(); ++other)
            result = combine(result, memory[other][lane() * kWidth + i]);
        values[i] = result;
    }
}

// A NaN is no maximum: it reaches the total of its sample by its exponential.
struct Higher {
    template <typename Exact>
    __device__ Exact operator()(Exact one, Exact other) const {
        return one < other ? other : one;
    }
};
struct Plus {
    template <typename Exact>
    __device__ Exact operator()(Exact one, Exact other) const {
        return one + other;
    }
};

// By one warp: what its block found out about its samples, [segments, batch].
template <typename Exact, int kWidth>
__device__ inline void write_part(const Exact (&values)[kWidth], const Samples<kWidth> &samples, Index place,
                                  Exact *parts) {
    if (warp() != 0 || !samples.inside) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
        parts[place + samples.mine + i] = values[i];
}

// Calls use(samples, segment, begin, end) for every part of a chunk that is this block's; [begin, end) are its classes.
template <int kWidth, typename Use>
__device__ inline void each_part(const Chunk &chunk, const Division &division, Use use) {
    const Index tiles = Samples<kWidth>::tiles(chunk.batch);
#pragma unroll 1
    for (Index part = blockIdx.x; part < tiles * division.segments; part += gridDim.x) {
        const Index segment = part / tiles, begin = segment * division.segment_classes;
        const Index end = begin + division.segment_classes;
        use(Samples<kWidth>(part % tiles, chunk.batch), segment, begin, end < chunk.classes ? end : chunk.classes);
    }
}

} // namespace hybridpar::cuda

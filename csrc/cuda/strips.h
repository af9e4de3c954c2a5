#pragma once

#include "threads.h"
#include "values.h"

// Note [strips]
// A warp takes a row at a time, strip by strip: each of its threads every so many-th few elements, so that neighbouring
// threads touch neighbouring memory. A row that is no longer than one strip stays in registers from the first look at
// it to the last; a longer one is read again, and then comes from the nearest cache. Sums over a row are added up in
// an order that depends on its width alone.
//
// Rows, gradients and states may each be of any of the four formats. Which one is asked once for each strip, not for
// each element; arithmetic is in `Exact`, double for float64 rows, else float.
namespace hybridpar::cuda {

// As csrc/types.h numbers them.
enum class DType : Index { float32 = 0, float64 = 1, bfloat16 = 2, float16 = 3 };

// [.., width], contiguous.
struct Memory {
    void *values;
    DType dtype;
};

struct Rounding {
    bool stochastic;
    unsigned long long seed;
};

// Rounding of a float to one of the narrower formats is that of PyTorch; so is that of a double, by way of a float.
__device__ inline void to_exact(double value, float &exact) {
    exact = float_of(value);
}
template <typename Value, typename Exact>
__device__ inline void to_exact(Value value, Exact &exact) {
    widen(value, exact);
}
__device__ inline void from_exact(float exact, double &value) {
    value = double_of(exact);
}
template <typename Exact, typename Value>
__device__ inline void from_exact(Exact exact, Value &value) {
    narrow(exact, value);
}

// The final mixing of SplitMix64, as in csrc/splitmix.h.
__device__ inline unsigned long long mixed(unsigned long long state) {
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
    return state ^ (state >> 31);
}

// 32 random bits of a counter.
__device__ inline unsigned scrambled(unsigned counter) {
    counter = (counter ^ (counter >> 16)) * 0x7feb352du;
    counter = (counter ^ (counter >> 15)) * 0x846ca68bu;
    return counter ^ (counter >> 16);
}

// Up with the probability that the lower half of the bits says. Infinity and NaN stay what they are.
__device__ inline BFloat16 rounded_at_random(float value, unsigned random) {
    const unsigned bits = bits_of(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const unsigned quiet = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : bits;
    return {static_cast<unsigned short>((finite ? bits + (random & 0xffffu) : quiet) >> 16)};
}
__device__ inline float to_float(float value) {
    return value;
}
__device__ inline float to_float(double value) {
    return float_of(value);
}

struct ToNearest {
    template <typename Exact, typename Value>
    __device__ void operator()(Exact value, Index, Value &target) const {
        from_exact(value, target);
    }
};

// The same seed of a row and place in it give the same choice.
struct AtRandom {
    unsigned seed;

    template <typename Exact>
    __device__ void operator()(Exact value, Index d, BFloat16 &target) const {
        target = rounded_at_random(to_float(value), scrambled(seed + static_cast<unsigned>(d) * 0x9e3779b9u));
    }
};

// What one thread has of a strip: element i of vector v is number begin + (v * 32 + lane) * kWidth + i of the row.
template <typename Exact, int kWidth>
struct Strip {
    static constexpr int kMine = 64 / sizeof(Exact), kVectors = kMine / kWidth, kLength = kMine * kWarp;
    Exact values[kMine];

    __device__ static Index place(Index begin, int vector) {
        return begin + (vector * kWarp + lane()) * kWidth;
    }

    template <typename Value>
    __device__ void load_from(const Value *row, Index begin, Index width) {
        Vector<Value, kWidth> loaded[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            loaded[v] = {}; // what lies behind the end adds nothing to sums
            if (place(begin, v) < width)
                loaded[v] = *reinterpret_cast<const Vector<Value, kWidth> *>(row + place(begin, v));
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i)
            to_exact(loaded[i / kWidth].values[i % kWidth], values[i]);
    }

    // From row `row` of `memory`.
    __device__ void load(const Memory &memory, Index row, Index begin, Index width) {
        const Index at = row * width;
        switch (memory.dtype) {
        case DType::float32: return load_from(static_cast<const float *>(memory.values) + at, begin, width);
        case DType::float64: return load_from(static_cast<const double *>(memory.values) + at, begin, width);
        case DType::bfloat16: return load_from(static_cast<const BFloat16 *>(memory.values) + at, begin, width);
        default: return load_from(static_cast<const Float16 *>(memory.values) + at, begin, width);
        }
    }

    // Calls round(value, number of the element, target), and leaves here what was stored.
    template <typename Value, typename Round>
    __device__ void store_to(Value *row, Index begin, Index width, Round round) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (place(begin, v) >= width) continue;
            Vector<Value, kWidth> stored;
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                round(values[v * kWidth + i], place(begin, v) + i, stored.values[i]);
                to_exact(stored.values[i], values[v * kWidth + i]);
            }
            *reinterpret_cast<Vector<Value, kWidth> *>(row + place(begin, v)) = stored;
        }
    }

    // To the nearest.
    __device__ void store(const Memory &memory, Index row, Index begin, Index width) {
        const ToNearest nearest;
        const Index at = row * width;
        switch (memory.dtype) {
        case DType::float32: return store_to(static_cast<float *>(memory.values) + at, begin, width, nearest);
        case DType::float64: return store_to(static_cast<double *>(memory.values) + at, begin, width, nearest);
        case DType::bfloat16: return store_to(static_cast<BFloat16 *>(memory.values) + at, begin, width, nearest);
        default: return store_to(static_cast<Float16 *>(memory.values) + at, begin, width, nearest);
        }
    }

    // `stream` tells apart what is stored of one row: its weight, its states.
    __device__ void store(const Memory &memory, Index row, Index begin, Index width, const Rounding &rounding,
                          unsigned stream) {
        if (!rounding.stochastic || memory.dtype != DType::bfloat16) return store(memory, row, begin, width);
        const auto seed =
            static_cast<unsigned>(mixed(mixed(rounding.seed + stream) + static_cast<unsigned long long>(row)));
        store_to(static_cast<BFloat16 *>(memory.values) + row * width, begin, width, AtRandom{seed});
    }

    // The sum of the products of what this thread has.
    __device__ Exact dot(const Strip &other) const {
        Exact sum = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i)
            sum += values[i] * other.values[i];
        return sum;
    }
};

} // namespace hybridpar::cuda

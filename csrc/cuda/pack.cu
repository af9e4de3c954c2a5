// pack and unpack of pack.h on a CUDA device: many tensors and one bucket, cast, scaled, and counted where not finite,
// in one launch. Compiled at run time by hybridpar/kernels/cuda.py, with no header but those of this folder.
#include "items.h"
#include "values.h"

namespace hybridpar::cuda {

struct Arguments {
    Table table;
    const Index *geometry;
    Index items;
    int item_length;
    void *bucket;
    bool to_bucket;
};

// target = cast(source * factor)
template <typename From, typename To>
struct Convert {
    using Source = From;
    using Target = To;
    using Compute = typename Common<Source, Target>::Type;
    Compute factor;

    __device__ Target operator()(Source value, int &nonfinite) const {
        Compute wide;
        widen(value, wide);
        nonfinite += !is_finite(wide);
        Target result;
        narrow(product(wide, factor), result);
        return result;
    }
};

// The bits unchanged.
template <typename Value>
struct Copy {
    using Source = Value;
    using Target = Value;

    __device__ Value operator()(Value value, int &nonfinite) const {
        typename Common<Value, Value>::Type wide;
        widen(value, wide);
        nonfinite += !is_finite(wide);
        return value;
    }
};

// By value: a vector that is only referred to would be read element by element.
template <int kWidth, typename Cast>
__device__ inline Vector<typename Cast::Target, kWidth> cast_vector(Vector<typename Cast::Source, kWidth> source,
                                                                    const Cast &cast, int &nonfinite) {
    Vector<typename Cast::Target, kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
        result.values[i] = cast(source.values[i], nonfinite);
    return result;
}

// One warp: target[i] = cast(source[i]) for `count` vectors. A thread has several on their way at once, and reads them
// all before it writes any, so that a tensor may lie where its part of the bucket is.
template <int kWidth, typename Cast>
__device__ inline void convert_vectors(const typename Cast::Source *from, typename Cast::Target *to, int count,
                                       const Cast &cast, int &nonfinite) {
    constexpr int kAtOnce = kWidth == 1 ? 8 : 4;
    const auto *source = reinterpret_cast<const Vector<typename Cast::Source, kWidth> *>(from);
    auto *target = reinterpret_cast<Vector<typename Cast::Target, kWidth> *>(to);
    int at = lane();
#pragma unroll 1
    for (; at + (kAtOnce - 1) * kWarp < count; at += kAtOnce * kWarp) {
        Vector<typename Cast::Source, kWidth> loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            loaded[i] = source[at + i * kWarp];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            target[at + i * kWarp] = cast_vector(loaded[i], cast, nonfinite);
    }
#pragma unroll 1
    for (; at < count; at += kWarp)
        target[at] = cast_vector(source[at], cast, nonfinite);
}

// The same for elements: 16 bytes at a time on the wider side, wherever both sides' addresses allow it.
template <typename Cast>
__device__ inline void convert_contiguous(const typename Cast::Source *source, typename Cast::Target *target, int count,
                                          const Cast &cast, int &nonfinite) {
    constexpr int kWider = sizeof(typename Cast::Source) > sizeof(typename Cast::Target)
                               ? sizeof(typename Cast::Source)
                               : sizeof(typename Cast::Target);
    constexpr int kWidth = 16 / kWider;
    const int head = elements_to_alignment(source, target, kWidth);
    if (head < 0 || count < kWarp) return convert_vectors<1>(source, target, count, cast, nonfinite);
    const int vectors = (count - head) / kWidth;
    const int tail = head + vectors * kWidth;
    // Head and tail are both shorter than a vector: one thread for each element.
    if (lane() < head) target[lane()] = cast(source[lane()], nonfinite);
    if (tail + lane() < count) target[tail + lane()] = cast(source[tail + lane()], nonfinite);
    convert_vectors<kWidth>(source + head, target + head, vectors, cast, nonfinite);
}

template <typename Cast>
__device__ inline void convert_item(const Arguments &arguments, const Item &item, const Cast &cast, int &nonfinite) {
    const Table &table = arguments.table;
    const Index tensor = table.address(item.tensor);
    const Index bucket = reinterpret_cast<Index>(arguments.bucket);
    const Index place = table.place_in_bucket(item.tensor) + item.begin;
    const bool packs = arguments.to_bucket;
    const auto *source = global_pointer<const typename Cast::Source>(packs ? tensor : bucket);
    auto *target = global_pointer<typename Cast::Target>(packs ? bucket : tensor);
    const Index geometry_at = table.geometry_at(item.tensor);
    if (tensor == 0) { // missing: zeros in the bucket, and nothing to write the other way
#pragma unroll 1
        for (int i = lane(); packs && i < item.length; i += kWarp)
            target[place + i] = typename Cast::Target{};
    } else if (geometry_at < 0) {
        convert_contiguous(source + (packs ? item.begin : place), target + (packs ? place : item.begin), item.length,
                           cast, nonfinite);
    } else {
#pragma unroll 1
        for (int i = lane(); i < item.length; i += kWarp) {
            const Index offset = strided_offset(arguments.geometry + geometry_at, item.begin + i);
            target[packs ? place + i : offset] = cast(source[packs ? offset : place + i], nonfinite);
        }
    }
}

// Note [items]
template <typename Cast>
__device__ inline void convert_items(const Arguments &arguments, const Cast &cast, unsigned long long *nonfinite) {
    const Index warps = static_cast<Index>(gridDim.x) * blockDim.x / kWarp;
    Index number = (static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    int found = 0;
    for (; number < arguments.items; number += warps)
        convert_item(arguments, find_item(arguments.table, number, arguments.item_length), cast, found);
    if (found != 0) atomicAdd(nonfinite, static_cast<unsigned long long>(found));
}

} // namespace hybridpar::cuda

// Every kernel takes: the table and its number of tensors, the geometry that it points into, the number of items and
// their length, the bucket, 1 for pack or 0 for unpack, the scale, and where to add the count of non-finite values.
#define HYBRIDPAR_PARAMETERS                                                                                        \
    const long long *numbers, long long tensors, const long long *geometry, long long items, long long item_length, \
        void *bucket, long long to_bucket, double scale, unsigned long long *nonfinite
#define HYBRIDPAR_ARGUMENTS {{numbers, tensors}, geometry, items, static_cast<int>(item_length), bucket, to_bucket != 0}

#define HYBRIDPAR_CONVERT(name, From, To)                    \
    extern "C" __global__ void name(HYBRIDPAR_PARAMETERS) {  \
        using namespace hybridpar::cuda;                     \
        Convert<From, To> cast;                              \
        narrow(scale, cast.factor);                          \
        convert_items(HYBRIDPAR_ARGUMENTS, cast, nonfinite); \
    }
#define HYBRIDPAR_COPY(name, Value)                                   \
    extern "C" __global__ void name(HYBRIDPAR_PARAMETERS) {           \
        using namespace hybridpar::cuda;                              \
        convert_items(HYBRIDPAR_ARGUMENTS, Copy<Value>{}, nonfinite); \
    }

HYBRIDPAR_CONVERT(convert_float32_to_float32, float, float)
HYBRIDPAR_CONVERT(convert_float32_to_float64, float, double)
HYBRIDPAR_CONVERT(convert_float32_to_bfloat16, float, BFloat16)
HYBRIDPAR_CONVERT(convert_float32_to_float16, float, Float16)
HYBRIDPAR_CONVERT(convert_float64_to_float32, double, float)
HYBRIDPAR_CONVERT(convert_float64_to_float64, double, double)
HYBRIDPAR_CONVERT(convert_float64_to_bfloat16, double, BFloat16)
HYBRIDPAR_CONVERT(convert_float64_to_float16, double, Float16)
HYBRIDPAR_CONVERT(convert_bfloat16_to_float32, BFloat16, float)
HYBRIDPAR_CONVERT(convert_bfloat16_to_float64, BFloat16, double)
HYBRIDPAR_CONVERT(convert_bfloat16_to_bfloat16, BFloat16, BFloat16)
HYBRIDPAR_CONVERT(convert_bfloat16_to_float16, BFloat16, Float16)
HYBRIDPAR_CONVERT(convert_float16_to_float32, Float16, float)
HYBRIDPAR_CONVERT(convert_float16_to_float64, Float16, double)
HYBRIDPAR_CONVERT(convert_float16_to_bfloat16, Float16, BFloat16)
HYBRIDPAR_CONVERT(convert_float16_to_float16, Float16, Float16)
HYBRIDPAR_COPY(copy_float32, float)
HYBRIDPAR_COPY(copy_float64, double)
HYBRIDPAR_COPY(copy_bfloat16, BFloat16)
HYBRIDPAR_COPY(copy_float16, Float16)

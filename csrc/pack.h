#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace hybridpar {

// One tensor as the kernels see it. `shape` and `strides` (in elements) hold `dimensions` numbers each;
// dimensions == 0 means contiguous. Data null means missing.
struct Tensor {
    void *data;
    std::int64_t count;
    DType dtype;
    std::int64_t dimensions;
    const std::int64_t *shape;
    const std::int64_t *strides;
};

struct Bucket {
    void *data;
    std::int64_t count;
    DType dtype;
};

// bucket[...] = cast(tensors * scale): the tensors one after the other, each in row-major order of its
// logical indices. A missing tensor leaves zeros. Returns how many source values were NaN or infinite.
//
// The product is taken in float64 where source or target is float64, else in float32; float64 reaches
// a half format by way of float32. Throws std::invalid_argument unless the counts add up to the bucket's.
std::int64_t pack(const Tensor *tensors, std::size_t size, const Bucket &bucket, double scale);

// tensors = cast(bucket[...] * scale), the twin. A missing tensor's part of the bucket is not read.
std::int64_t unpack(const Bucket &bucket, const Tensor *tensors, std::size_t size, double scale);

} // namespace hybridpar

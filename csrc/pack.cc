#include "pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "clones.h"

namespace hybridpar {
namespace {

// Values copied at a time when a tensor is not contiguous; small enough to stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;

// Converts `count` contiguous values, returns how many of the sources were not finite.
using Convert = std::int64_t (*)(const void *source, void *target, std::int64_t count, double scale);

HYBRIDPAR_INLINE double load(double value, double) {
    return value;
}

template <typename Source>
HYBRIDPAR_INLINE double load(Source value, double) {
    return to_float(value);
}

template <typename Source>
HYBRIDPAR_INLINE float load(Source value, float) {
    return to_float(value);
}

HYBRIDPAR_INLINE void save(double &target, double value) {
    target = value;
}

template <typename Target>
HYBRIDPAR_INLINE void save(Target &target, double value) {
    store(target, static_cast<float>(value));
}

template <typename Target>
HYBRIDPAR_INLINE void save(Target &target, float value) {
    store(target, value);
}

template <typename Source, typename Target>
HYBRIDPAR_INLINE std::int64_t convert(const void *from, void *to, std::int64_t count, double scale) {
    constexpr bool is_double = std::is_same_v<Source, double> || std::is_same_v<Target, double>;
    using Compute = std::conditional_t<is_double, double, float>;
    using Counter = std::conditional_t<is_double, std::int64_t, std::int32_t>;
    constexpr std::int64_t longest = std::int64_t{1} << 30; // what a 32-bit counter surely holds
    const auto *source = static_cast<const Source *>(from);
    auto *target = static_cast<Target *>(to);
    const auto factor = static_cast<Compute>(scale);
    std::int64_t bad = 0;
    for (std::int64_t begin = 0; begin < count; begin += longest) {
        const std::int64_t end = std::min(count, begin + longest);
        Counter bad_here = 0;
        for (std::int64_t i = begin; i < end; ++i) {
            const Compute value = load(source[i], Compute{});
            bad_here += !(std::fabs(value) <= std::numeric_limits<Compute>::max());
            save(target[i], value * factor);
        }
        bad += bad_here;
    }
    return bad;
}

template <typename Value>
HYBRIDPAR_INLINE std::int64_t count_bad(const Value *values, std::int64_t count) {
    using Compute = std::conditional_t<std::is_same_v<Value, double>, double, float>;
    using Counter = std::conditional_t<std::is_same_v<Value, double>, std::int64_t, std::int32_t>;
    Counter bad = 0;
    for (std::int64_t i = 0; i < count; ++i)
        bad += !(std::fabs(load(values[i], Compute{})) <= std::numeric_limits<Compute>::max());
    return bad;
}

// The bits unchanged; counted while the block is still in the cache.
template <typename Value>
HYBRIDPAR_INLINE std::int64_t copy(const void *from, void *to, std::int64_t count) {
    const auto *source = static_cast<const Value *>(from);
    auto *target = static_cast<Value *>(to);
    std::int64_t bad = 0;
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
        const std::int64_t length = std::min(kBlock, count - begin);
        if (source != target) std::memcpy(target + begin, source + begin, length * sizeof(Value));
        bad += count_bad(source + begin, length);
    }
    return bad;
}

#define HYBRIDPAR_CONVERT(name, Source, Target)                                                              \
    HYBRIDPAR_CLONES std::int64_t name(const void *source, void *target, std::int64_t count, double scale) { \
        return convert<Source, Target>(source, target, count, scale);                                        \
    }
#define HYBRIDPAR_COPY(name, Value)                                                                    \
    HYBRIDPAR_CLONES std::int64_t name(const void *source, void *target, std::int64_t count, double) { \
        return copy<Value>(source, target, count);                                                     \
    }

HYBRIDPAR_CONVERT(float32_to_float32, float, float)
HYBRIDPAR_CONVERT(float32_to_float64, float, double)
HYBRIDPAR_CONVERT(float32_to_bfloat16, float, BFloat16)
HYBRIDPAR_CONVERT(float32_to_float16, float, Float16)
HYBRIDPAR_CONVERT(float64_to_float32, double, float)
HYBRIDPAR_CONVERT(float64_to_float64, double, double)
HYBRIDPAR_CONVERT(float64_to_bfloat16, double, BFloat16)
HYBRIDPAR_CONVERT(float64_to_float16, double, Float16)
HYBRIDPAR_CONVERT(bfloat16_to_float32, BFloat16, float)
HYBRIDPAR_CONVERT(bfloat16_to_float64, BFloat16, double)
HYBRIDPAR_CONVERT(bfloat16_to_bfloat16, BFloat16, BFloat16)
HYBRIDPAR_CONVERT(bfloat16_to_float16, BFloat16, Float16)
HYBRIDPAR_CONVERT(float16_to_float32, Float16, float)
HYBRIDPAR_CONVERT(float16_to_float64, Float16, double)
HYBRIDPAR_CONVERT(float16_to_bfloat16, Float16, BFloat16)
HYBRIDPAR_CONVERT(float16_to_float16, Float16, Float16)
HYBRIDPAR_COPY(copy_float32, float)
HYBRIDPAR_COPY(copy_float64, double)
HYBRIDPAR_COPY(copy_bfloat16, BFloat16)
HYBRIDPAR_COPY(copy_float16, Float16)

// Rows and columns in the order of DType.
constexpr std::array<std::array<Convert, kDTypes>, kDTypes> kConvert = {{
    {float32_to_float32, float32_to_float64, float32_to_bfloat16, float32_to_float16},
    {float64_to_float32, float64_to_float64, float64_to_bfloat16, float64_to_float16},
    {bfloat16_to_float32, bfloat16_to_float64, bfloat16_to_bfloat16, bfloat16_to_float16},
    {float16_to_float32, float16_to_float64, float16_to_bfloat16, float16_to_float16},
}};
constexpr std::array<Convert, kDTypes> kCopy = {copy_float32, copy_float64, copy_bfloat16, copy_float16};

Convert choose(DType source, DType target, double scale) {
    const auto from = static_cast<std::size_t>(source);
    const auto to = static_cast<std::size_t>(target);
    return from == to && scale == 1.0 ? kCopy[from] : kConvert[from][to];
}

std::byte *at(void *data, std::int64_t index, DType dtype) {
    return static_cast<std::byte *>(data) + index * static_cast<std::int64_t>(item_size(dtype));
}

// A piece of a strided tensor: `rows` runs of `length` elements, the first at `offset`.
struct Tile {
    std::int64_t offset, rows, length, row_step, step;
};

// Visits a strided tensor in row-major order of its logical indices, tile by tile. Neighbouring dimensions
// that form one arithmetic sequence are merged first.
class RowMajor {
  public:
    explicit RowMajor(const Tensor &tensor) {
        // Two dimensions at least, so that there always are rows.
        shape_ = {1, 1};
        strides_ = {0, 0};
        for (std::int64_t i = 0; i < tensor.dimensions; ++i) {
            if (tensor.shape[i] == 1) continue;
            if (shape_.back() > 1 && strides_.back() == tensor.shape[i] * tensor.strides[i]) {
                shape_.back() *= tensor.shape[i];
                strides_.back() = tensor.strides[i];
            } else {
                shape_.push_back(tensor.shape[i]);
                strides_.push_back(tensor.strides[i]);
            }
        }
        index_.assign(shape_.size(), 0);
    }

    // The next elements, `limit` at most: whole rows where they fit, else a piece of one.
    Tile next(std::int64_t limit) {
        const std::size_t last = shape_.size() - 1;
        Tile tile{offset_, 1, std::min(limit, shape_[last] - index_[last]), strides_[last - 1], strides_[last]};
        if (tile.length == shape_[last]) {
            tile.rows = std::min(limit / tile.length, shape_[last - 1] - index_[last - 1]);
            advance(last - 1, tile.rows);
        } else {
            advance(last, tile.length);
        }
        return tile;
    }

  private:
    // Moves on in one dimension and carries into those before it.
    void advance(std::size_t dimension, std::int64_t by) {
        index_[dimension] += by;
        offset_ += by * strides_[dimension];
        for (std::size_t i = dimension; i > 0 && index_[i] == shape_[i]; --i) {
            offset_ += strides_[i - 1] - index_[i] * strides_[i];
            index_[i] = 0;
            ++index_[i - 1];
        }
    }

    std::vector<std::int64_t> shape_, strides_, index_;
    std::int64_t offset_ = 0;
};
// Where the rows and their elements lie on one side of a copy, in elements.
struct Steps {
    std::int64_t row, element;
};

template <typename Bits>
void copy_tile(const void *source, Steps from, void *target, Steps to, std::int64_t rows, std::int64_t length) {
    const auto *in = static_cast<const Bits *>(source);
    auto *out = static_cast<Bits *>(target);
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t i = 0; i < length; ++i)
            out[row * to.row + i * to.element] = in[row * from.row + i * from.element];
}

// Bits unchanged, between a tile of a tensor and its row-major copy in a block.
void copy_tile(DType dtype, const void *source, Steps from, void *target, Steps to, Tile tile) {
    // Transposed memory, such as channels-last weights, is walked along its own rows.
    if (tile.rows > 1 && tile.row_step < tile.step) {
        std::swap(from.row, from.element);
        std::swap(to.row, to.element);
        std::swap(tile.rows, tile.length);
    }
    switch (item_size(dtype)) {
    case 2: return copy_tile<std::uint16_t>(source, from, target, to, tile.rows, tile.length);
    case 4: return copy_tile<std::uint32_t>(source, from, target, to, tile.rows, tile.length);
    default: return copy_tile<std::uint64_t>(source, from, target, to, tile.rows, tile.length);
    }
}

struct alignas(64) Block {
    std::array<std::byte, kBlock * sizeof(double)> bytes;
};

std::int64_t pack_strided(const Tensor &tensor, std::byte *target, DType dtype, Convert convert, double scale) {
    RowMajor walk(tensor);
    Block block;
    std::int64_t bad = 0;
    for (std::int64_t done = 0; done < tensor.count;) {
        const std::int64_t length = std::min(kBlock, tensor.count - done);
        for (std::int64_t filled = 0; filled < length;) {
            const Tile tile = walk.next(length - filled);
            copy_tile(tensor.dtype, at(tensor.data, tile.offset, tensor.dtype), {tile.row_step, tile.step},
                      at(&block, filled, tensor.dtype), {tile.length, 1}, tile);
            filled += tile.rows * tile.length;
        }
        bad += convert(&block, at(target, done, dtype), length, scale);
        done += length;
    }
    return bad;
}

std::int64_t unpack_strided(std::byte *source, DType dtype, const Tensor &tensor, Convert convert, double scale) {
    RowMajor walk(tensor);
    Block block;
    std::int64_t bad = 0;
    for (std::int64_t done = 0; done < tensor.count;) {
        const std::int64_t length = std::min(kBlock, tensor.count - done);
        bad += convert(at(source, done, dtype), &block, length, scale);
        for (std::int64_t drained = 0; drained < length;) {
            const Tile tile = walk.next(length - drained);
            copy_tile(tensor.dtype, at(&block, drained, tensor.dtype), {tile.length, 1},
                      at(tensor.data, tile.offset, tensor.dtype), {tile.row_step, tile.step}, tile);
            drained += tile.rows * tile.length;
        }
        done += length;
    }
    return bad;
}

void check_counts(const Tensor *tensors, std::size_t size, const Bucket &bucket) {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < size; ++i) {
        check(tensors[i].count >= 0 && tensors[i].count <= bucket.count - total, "expected counts that add up to ",
              bucket.count, ", the bucket's, got ", tensors[i].count, " at position ", i, " after ", total);
        total += tensors[i].count;
    }
    check(total == bucket.count, "expected counts that add up to ", bucket.count, ", the bucket's, got ", total);
    check(bucket.data != nullptr || bucket.count == 0, "expected a bucket with memory, got a null pointer");
}

} // namespace

std::int64_t pack(const Tensor *tensors, std::size_t size, const Bucket &bucket, double scale) {
    check_counts(tensors, size, bucket);
    std::int64_t bad = 0;
    std::byte *target = at(bucket.data, 0, bucket.dtype);
    for (std::size_t i = 0; i < size; ++i) {
        const Tensor &tensor = tensors[i];
        if (tensor.count > 0) {
            const Convert convert = choose(tensor.dtype, bucket.dtype, scale);
            if (tensor.data == nullptr)
                std::memset(target, 0, tensor.count * item_size(bucket.dtype));
            else if (tensor.dimensions == 0)
                bad += convert(tensor.data, target, tensor.count, scale);
            else
                bad += pack_strided(tensor, target, bucket.dtype, convert, scale);
        }
        target = at(target, tensor.count, bucket.dtype);
    }
    return bad;
}

std::int64_t unpack(const Bucket &bucket, const Tensor *tensors, std::size_t size, double scale) {
    check_counts(tensors, size, bucket);
    std::int64_t bad = 0;
    std::byte *source = at(bucket.data, 0, bucket.dtype);
    for (std::size_t i = 0; i < size; ++i) {
        const Tensor &tensor = tensors[i];
        if (tensor.count > 0 && tensor.data != nullptr) {
            const Convert convert = choose(bucket.dtype, tensor.dtype, scale);
            bad += tensor.dimensions == 0 ? convert(source, tensor.data, tensor.count, scale)
                                          : unpack_strided(source, bucket.dtype, tensor, convert, scale);
        }
        source = at(source, tensor.count, bucket.dtype);
    }
    return bad;
}

} // namespace hybridpar

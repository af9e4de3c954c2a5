#include "pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "check.h"

// Note [one build, several instruction sets]
// The package is compiled for the baseline of its architecture, so that a build runs on any machine of
// it. Where the compiler can, the conversion loops are cloned for wider vectors and the loader chooses.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HYBRIDPAR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define HYBRIDPAR_CLONES
#endif
#if defined(__GNUC__)
#define HYBRIDPAR_INLINE inline __attribute__((always_inline))
#else
#define HYBRIDPAR_INLINE inline
#endif

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

// Visits a strided tensor in row-major order of its logical indices: `next` yields runs of elements that
// lie `step` apart. Neighbouring dimensions that form one arithmetic sequence are merged first.
class RowMajor {
  public:
    explicit RowMajor(const Tensor &tensor) {
        for (std::int64_t i = 0; i < tensor.dimensions; ++i) {
            if (tensor.shape[i] == 1) continue;
            if (!shape_.empty() && strides_.back() == tensor.shape[i] * tensor.strides[i]) {
                shape_.back() *= tensor.shape[i];
                strides_.back() = tensor.strides[i];
            } else {
                shape_.push_back(tensor.shape[i]);
                strides_.push_back(tensor.strides[i]);
            }
        }
        if (shape_.empty()) {
            shape_.push_back(tensor.count);
            strides_.push_back(1);
        }
        index_.assign(shape_.size(), 0);
    }

    // At most `limit` elements: sets their first offset and returns their number.
    std::int64_t next(std::int64_t limit, std::int64_t &offset) {
        const std::size_t last = shape_.size() - 1;
        offset = offset_;
        const std::int64_t length = std::min(limit, shape_[last] - index_[last]);
        advance(last, length);
        for (std::size_t i = last; i > 0 && index_[i] == shape_[i]; --i) {
            offset_ -= index_[i] * strides_[i];
            index_[i] = 0;
            advance(i - 1, 1);
        }
        return length;
    }

    std::int64_t step() const {
        return strides_.back();
    }

  private:
    void advance(std::size_t dimension, std::int64_t by) {
        index_[dimension] += by;
        offset_ += by * strides_[dimension];
    }

    std::vector<std::int64_t> shape_, strides_, index_;
    std::int64_t offset_ = 0;
};

template <typename Bits>
void copy_strided(const void *source, std::int64_t source_step, void *target, std::int64_t target_step,
                  std::int64_t count) {
    const auto *from = static_cast<const Bits *>(source);
    auto *to = static_cast<Bits *>(target);
    for (std::int64_t i = 0; i < count; ++i)
        to[i * target_step] = from[i * source_step];
}

void copy_strided(DType dtype, const void *source, std::int64_t source_step, void *target, std::int64_t target_step,
                  std::int64_t count) {
    switch (item_size(dtype)) {
    case 2: return copy_strided<std::uint16_t>(source, source_step, target, target_step, count);
    case 4: return copy_strided<std::uint32_t>(source, source_step, target, target_step, count);
    default: return copy_strided<std::uint64_t>(source, source_step, target, target_step, count);
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
            std::int64_t offset = 0;
            const std::int64_t run = walk.next(length - filled, offset);
            copy_strided(tensor.dtype, at(tensor.data, offset, tensor.dtype), walk.step(),
                         at(&block, filled, tensor.dtype), 1, run);
            filled += run;
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
            std::int64_t offset = 0;
            const std::int64_t run = walk.next(length - drained, offset);
            copy_strided(tensor.dtype, at(&block, drained, tensor.dtype), 1, at(tensor.data, offset, tensor.dtype),
                         walk.step(), run);
            drained += run;
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

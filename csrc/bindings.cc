#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "check.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridpar {
namespace {

using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::int64_t kMaxDimensions = 64;

DType dtype_of(std::int64_t code) {
    check(code >= 0 && code < kDTypes, "expected a dtype code below ", int{kDTypes}, ", got ", code);
    return static_cast<DType>(code);
}

// Reads `geometry[begin:]` = dimensions, shape..., strides... into `tensor`; the shape must hold its count.
void set_geometry(Tensor &tensor, const Int64s &geometry, std::int64_t begin, std::size_t position) {
    const auto length = static_cast<std::int64_t>(geometry.shape(0));
    check(begin < length, "expected a geometry offset below ", length, ", got ", begin, " at position ", position);
    const std::int64_t *numbers = geometry.data() + begin;
    const std::int64_t dimensions = numbers[0];
    check(dimensions >= 1 && dimensions <= kMaxDimensions && begin + 1 + 2 * dimensions <= length, "expected 1 to ",
          kMaxDimensions, " dimensions inside the geometry array, got ", dimensions, " at position ", position);
    std::int64_t count = 1;
    for (std::int64_t i = 0; i < dimensions; ++i) {
        const std::int64_t extent = numbers[1 + i];
        check(extent >= 0 && (extent == 0 || count <= tensor.count / extent), "expected a shape of ", tensor.count,
              " elements, got a larger or negative one at position ", position);
        count *= extent;
    }
    check(count == tensor.count, "expected a shape of ", tensor.count, " elements, got ", count, " at position ",
          position);
    tensor.dimensions = dimensions;
    tensor.shape = numbers + 1;
    tensor.strides = numbers + 1 + dimensions;
}

std::vector<Tensor> tensors_of(const Int64s &pointers, const Int64s &counts, const Codes &dtypes,
                               const Int64s &geometry_at, const Int64s &geometry) {
    const std::size_t size = pointers.shape(0);
    check(counts.shape(0) == size && dtypes.shape(0) == size, "expected ", size, " counts and dtypes, got ",
          counts.shape(0), " and ", dtypes.shape(0));
    const bool has_strided = geometry_at.shape(0) != 0;
    check(!has_strided || geometry_at.shape(0) == size, "expected no geometry offset or ", size, ", got ",
          geometry_at.shape(0));
    std::vector<Tensor> tensors(size);
    for (std::size_t i = 0; i < size; ++i) {
        const auto address = static_cast<std::uintptr_t>(pointers.data()[i]);
        tensors[i] = {
            reinterpret_cast<void *>(address), counts.data()[i], dtype_of(dtypes.data()[i]), 0, nullptr, nullptr};
        if (has_strided && geometry_at.data()[i] >= 0 && tensors[i].count > 0)
            set_geometry(tensors[i], geometry, geometry_at.data()[i], i);
    }
    return tensors;
}

Bucket bucket_of(std::uintptr_t pointer, std::int64_t count, std::int64_t dtype) {
    check(count >= 0, "expected a bucket of zero or more elements, got ", count);
    return {reinterpret_cast<void *>(pointer), count, dtype_of(dtype)};
}

} // namespace
} // namespace hybridpar

NB_MODULE(_native, module) {
    using namespace hybridpar;

    module.attr("FLOAT32") = static_cast<int>(DType::float32);
    module.attr("FLOAT64") = static_cast<int>(DType::float64);
    module.attr("BFLOAT16") = static_cast<int>(DType::bfloat16);
    module.attr("FLOAT16") = static_cast<int>(DType::float16);

    module.def(
        "pack",
        [](const Int64s &pointers, const Int64s &counts, const Codes &dtypes, const Int64s &geometry_at,
           const Int64s &geometry, std::uintptr_t bucket, std::int64_t bucket_count, std::int64_t bucket_dtype,
           double scale) {
            const auto tensors = tensors_of(pointers, counts, dtypes, geometry_at, geometry);
            const Bucket target = bucket_of(bucket, bucket_count, bucket_dtype);
            const nb::gil_scoped_release release;
            return pack(tensors.data(), tensors.size(), target, scale);
        },
        "pointers"_a.noconvert(), "counts"_a.noconvert(), "dtypes"_a.noconvert(), "geometry_at"_a.noconvert(),
        "geometry"_a.noconvert(), "bucket"_a, "bucket_count"_a, "bucket_dtype"_a, "scale"_a);

    module.def(
        "unpack",
        [](std::uintptr_t bucket, std::int64_t bucket_count, std::int64_t bucket_dtype, const Int64s &pointers,
           const Int64s &counts, const Codes &dtypes, const Int64s &geometry_at, const Int64s &geometry, double scale) {
            const auto tensors = tensors_of(pointers, counts, dtypes, geometry_at, geometry);
            const Bucket source = bucket_of(bucket, bucket_count, bucket_dtype);
            const nb::gil_scoped_release release;
            return unpack(source, tensors.data(), tensors.size(), scale);
        },
        "bucket"_a, "bucket_count"_a, "bucket_dtype"_a, "pointers"_a.noconvert(), "counts"_a.noconvert(),
        "dtypes"_a.noconvert(), "geometry_at"_a.noconvert(), "geometry"_a.noconvert(), "scale"_a);
}

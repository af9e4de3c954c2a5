#pragma once

#include <cstdint>

#include "types.h"

namespace hybridpar {

// What a tensor is, as a framework's DLPack exchange API tells it: the stable C structures of
// https://dmlc.github.io/dlpack (version 1), as far as they are used here.
struct DlTensor {
    void *data;
    std::int32_t device_type, device_number;
    std::int32_t dimensions;
    std::uint8_t type_code, bits;
    std::uint16_t lanes;
    const std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

struct DlExchange {
    struct {
        std::uint32_t major, minor;
        void *older;
    } header;
    void *allocate, *managed_from_object, *managed_to_object;
    // Fills in what the object is, 0 for success; it stays valid while the tensor is as it is. Sets a Python error.
    int (*tensor_from_object)(void *object, DlTensor *tensor);
};

constexpr std::uint32_t kDlMajor = 1;
constexpr const char *kDlCapsule = "dlpack_exchange_api";

// On CPU, with one value of this type in each element.
bool is_plain(const DlTensor &tensor, DType dtype);
bool has_shape(const DlTensor &tensor, const std::int64_t *shape, std::int64_t dimensions);
// Row by row, without gaps.
bool is_contiguous(const DlTensor &tensor);
std::int64_t element_count(const DlTensor &tensor);
std::uintptr_t address_of(const DlTensor &tensor);

} // namespace hybridpar

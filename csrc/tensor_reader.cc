#include "tensor_reader.h"

#include <algorithm>

namespace hybridpar {
namespace {

constexpr std::int32_t kCpu = 1;
constexpr std::uint8_t kFloat = 2, kBFloat = 4;

} // namespace

bool is_plain(const DlTensor &tensor, DType dtype) {
    const std::uint8_t code = dtype == DType::bfloat16 ? kBFloat : kFloat;
    return tensor.device_type == kCpu && tensor.type_code == code && tensor.bits == 8 * item_size(dtype) &&
           tensor.lanes == 1;
}

bool has_shape(const DlTensor &tensor, const std::int64_t *shape, std::int64_t dimensions) {
    return tensor.dimensions == dimensions && std::equal(shape, shape + dimensions, tensor.shape);
}

bool is_contiguous(const DlTensor &tensor) {
    if (tensor.strides == nullptr) return true;
    std::int64_t step = 1;
    for (std::int32_t i = tensor.dimensions; i-- > 0;) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
        step *= tensor.shape[i];
    }
    return true;
}

std::int64_t element_count(const DlTensor &tensor) {
    std::int64_t count = 1;
    for (std::int32_t i = 0; i < tensor.dimensions; ++i)
        count *= tensor.shape[i];
    return count;
}

std::uintptr_t address_of(const DlTensor &tensor) {
    return tensor.data == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

} // namespace hybridpar

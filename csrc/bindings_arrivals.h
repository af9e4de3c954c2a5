#pragma once

#include <nanobind/nanobind.h>

namespace hybridpar {

// What stands around the accumulation of each gradient. Tensors are seen by their Python attributes only: the package
// is not compiled against torch.
void bind_arrivals(nanobind::module_ &module);

} // namespace hybridpar

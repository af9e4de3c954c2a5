#pragma once

#include <nanobind/nanobind.h>

namespace hybridpar {

// What a classification head uses. Every pointer is an address, 0 for a missing one; all memory is contiguous.
void bind_head(nanobind::module_ &module);

} // namespace hybridpar

#pragma once

#include <sstream>
#include <stdexcept>

namespace hybridpar {

// Throws std::invalid_argument (ValueError in Python) with the parts joined, unless `condition` holds.
template <typename... Parts>
void check(bool condition, const Parts &...parts) {
    if (condition) return;
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

} // namespace hybridpar

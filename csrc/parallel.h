#pragma once

#include <cstdint>
#include <functional>

namespace hybridpar {

// Calls work(part) once for each part in [0, parts), on `threads` threads at most, this one among them, and returns
// when all are done. `work` must not throw. Any thread may call this, several at once, also in a forked child.
void in_parallel(std::int64_t parts, std::int64_t threads, const std::function<void(std::int64_t)> &work);

} // namespace hybridpar

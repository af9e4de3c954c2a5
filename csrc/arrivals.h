#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridpar {

// Which tensors have arrived in a round, and how many each bucket still waits for. Not for several threads at once: in
// Python the interpreter's lock is held.
class Arrivals {
  public:
    // `buckets`: for each tensor the number of its bucket, 0 or above. Nothing has arrived.
    void arrange(const std::vector<std::int64_t> &buckets);

    bool has(std::int64_t tensor) const {
        return arrived_[checked(tensor)];
    }

    // A tensor that has not arrived yet does so now. Returns whether its bucket is complete.
    bool add(std::int64_t tensor);

    // Whether the tensor has not arrived, and others of its bucket have not either.
    bool leaves_bucket_open(std::int64_t tensor) const {
        const std::size_t place = checked(tensor);
        return !arrived_[place] && missing_[bucket_of_[place]] > 1;
    }

    // How many of a bucket's tensors have arrived.
    std::int64_t count(std::int64_t bucket) const;

    // None of a bucket's tensors has arrived.
    void clear(std::int64_t bucket);

  private:
    std::size_t checked(std::int64_t tensor) const;
    const std::vector<std::size_t> &members(std::int64_t bucket) const;

    std::vector<std::size_t> bucket_of_;
    std::vector<std::uint8_t> arrived_;
    std::vector<std::vector<std::size_t>> members_;
    std::vector<std::size_t> missing_;
};

} // namespace hybridpar

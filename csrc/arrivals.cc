#include "arrivals.h"

#include "check.h"

namespace hybridpar {

void Arrivals::arrange(const std::vector<std::int64_t> &buckets) {
    const auto size = static_cast<std::int64_t>(buckets.size());
    std::vector<std::size_t> bucket_of(buckets.size());
    std::vector<std::vector<std::size_t>> members;
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        check(buckets[i] >= 0 && buckets[i] < size, "expected the numbers of up to ", size,
              " buckets, counted from 0, got ", buckets[i], " for tensor ", i);
        bucket_of[i] = static_cast<std::size_t>(buckets[i]);
        if (bucket_of[i] >= members.size()) members.resize(bucket_of[i] + 1);
        members[bucket_of[i]].push_back(i);
    }
    bucket_of_ = std::move(bucket_of);
    members_ = std::move(members);
    arrived_.assign(buckets.size(), 0);
    missing_.clear();
    for (const auto &of_bucket : members_)
        missing_.push_back(of_bucket.size());
}

bool Arrivals::add(std::int64_t tensor) {
    const std::size_t place = checked(tensor);
    check(!arrived_[place], "expected a tensor that has not arrived yet, got tensor ", tensor);
    arrived_[place] = 1;
    return --missing_[bucket_of_[place]] == 0;
}

std::int64_t Arrivals::count(std::int64_t bucket) const {
    return static_cast<std::int64_t>(members(bucket).size() - missing_[static_cast<std::size_t>(bucket)]);
}

void Arrivals::clear(std::int64_t bucket) {
    const auto &of_bucket = members(bucket);
    for (const std::size_t place : of_bucket)
        arrived_[place] = 0;
    missing_[static_cast<std::size_t>(bucket)] = of_bucket.size();
}

std::size_t Arrivals::checked(std::int64_t tensor) const {
    check(tensor >= 0 && tensor < static_cast<std::int64_t>(arrived_.size()), "expected a tensor below ",
          arrived_.size(), ", got ", tensor);
    return static_cast<std::size_t>(tensor);
}

const std::vector<std::size_t> &Arrivals::members(std::int64_t bucket) const {
    check(bucket >= 0 && bucket < static_cast<std::int64_t>(members_.size()), "expected a bucket below ",
          members_.size(), ", got ", bucket);
    return members_[static_cast<std::size_t>(bucket)];
}

} // namespace hybridpar

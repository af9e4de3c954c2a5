#include <algorithm>
#include <iterator>
#include <utility>

#include "ranges.h"
#include "shm.h"

// Note [buckets]
// Where the data of all ranks lies in their buckets, nothing is staged: ranks read each other's buckets. A rank finds
// that from its own addresses alone, and announces the place with the collective; ranks that do not all name the same
// place all throw. Gathering and scattering know a bucket by the list of parts, whatever the single tensor is: only the
// list has the same meaning on all ranks, and a rank whose own part is empty has no address for it.
//
// The first wait says that every bucket is ready to be read. Then a rank writes only what no other rank reads: its
// slice of every bucket (all_reduce), its own part of its own bucket (reduce_scatter), copies of its share of the whole
// (all_gather). The last wait says that nobody reads or writes this rank's bucket any more, so that the caller
// may write into it.

namespace hybridpar {

// Note [buckets]: each rank sums its slice of all ranks' buckets and writes it into all of them.
void Communicator::reduce_in_place(const Place &place, std::int64_t count, DType dtype, Reduction reduction) {
    const Range own = slice(count, board_.rank(), board_.size(), item_size(dtype));
    board_.publish();
    board_.await_all(board_.step());
    check_agreement();
    for (std::size_t peer = 0; peer < board_.size(); ++peer) {
        targets_[peer] = place.of(peer) + own.begin * item_size(dtype);
        sources_[peer] = targets_[peer];
    }
    reduce(sources_.data(), board_.size(), targets_.data(), board_.size(), own.length(), dtype, reduction);
    board_.publish();
    board_.await_all(board_.step());
}

// Note [buckets]: each rank copies an equal share of the whole, whoever has it, into all the other buckets. So it is
// read once, and ranks without a part do as much as those that have one.
void Communicator::gather_in_place(const Place &place, const std::vector<std::int64_t> &bytes, const void *input) {
    const std::size_t rank = board_.rank(), size = board_.size();
    std::byte *mine = place.of(rank) + sum_of(bytes, rank);
    if (mine != input) copy_items(mine, static_cast<const std::byte *>(input), bytes[rank]);
    board_.publish();
    board_.await_all(board_.step());
    check_agreement();
    const Range share = slice(sum_of(bytes, size), rank, size, 1);
    Range part{0, 0};
    for (std::size_t owner = 0; owner < size; ++owner) {
        part = {part.end, part.end + bytes[owner]};
        const Range own = common(share, part);
        std::size_t others = 0;
        for (std::size_t peer = 0; peer < size; ++peer)
            if (peer != owner) targets_[others++] = place.of(peer) + own.begin;
        if (own.length() > 0) spread(targets_.data(), others, place.of(owner) + own.begin, own.length());
    }
    board_.publish();
    board_.await_all(board_.step());
}

// Note [buckets]: each rank sums its part of all ranks' buckets.
void Communicator::scatter_in_place(void *output, const Place &place, const std::vector<std::int64_t> &counts,
                                    DType dtype) {
    const std::size_t rank = board_.rank(), size = board_.size();
    const std::int64_t begin = sum_of(counts, rank) * static_cast<std::int64_t>(item_size(dtype));
    board_.publish();
    board_.await_all(board_.step());
    check_agreement();
    for (std::size_t peer = 0; peer < size; ++peer)
        sources_[peer] = place.of(peer) + begin;
    reduce(sources_.data(), size, &output, 1, counts[rank], dtype, Reduction::sum);
    board_.publish();
    board_.await_all(board_.step());
}

void Communicator::add_buckets(const std::byte *base, std::size_t stride, std::uint32_t number) {
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    buckets_.insert_or_assign(base, Buckets{stride, number});
}

void Communicator::drop_buckets(const std::byte *base) {
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    buckets_.erase(base);
}

Communicator::Place Communicator::find_place(const void *data, std::int64_t bytes) {
    const auto *begin = static_cast<const std::byte *>(data);
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    const auto above = buckets_.upper_bound(begin);
    if (above == buckets_.begin()) return {};
    const auto &[base, buckets] = *std::prev(above);
    const std::byte *mine = base + board_.rank() * buckets.stride;
    if (begin < mine || begin + bytes > mine + buckets.stride) return {};
    const std::size_t offset = begin - mine;
    return {const_cast<std::byte *>(base) + offset, buckets.stride, std::uint64_t{buckets.number} << 40 | offset};
}

} // namespace hybridpar

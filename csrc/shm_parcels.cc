#include <cstring>
#include <sstream>

#include "check.h"
#include "ranges.h"
#include "shm.h"

// Note [parcels]
// In an all-to-all the chunks of a rank are one stream: how many bytes it sends to each rank and expects from each,
// then what is for the next rank, for the one after it, and so on round, so that every rank has some to fetch from
// each chunk round. The sizes of all ranks say where in a stream one's own part begins, how many chunks the longest
// stream has, which no rank knows before, and whether sender and receiver mean the same.

namespace hybridpar {

void Communicator::all_to_all(const std::vector<void *> &outputs, const std::vector<std::int64_t> &received,
                              const std::vector<const void *> &inputs, const std::vector<std::int64_t> &sent) {
    const auto lock = enter();
    const std::size_t rank = board_.rank(), size = board_.size();
    check(outputs.size() == size && received.size() == size && inputs.size() == size && sent.size() == size,
          "expected one input and one output for each of ", size, " ranks, got ", inputs.size(), " and ",
          outputs.size());
    begin(Kind::all_to_all, 0, DType::uint8, Reduction::sum, 0, 0);
    const auto chunk_bytes = static_cast<std::int64_t>(chunk_bytes_);
    const auto header = static_cast<std::int64_t>(2 * size * sizeof(std::int64_t));
    std::vector<std::int64_t> starts(size); // of this rank's part in each rank's stream
    std::int64_t longest = header;
    const auto fill = [&](std::int64_t chunk, std::byte *staged) {
        const Range range{chunk * chunk_bytes, (chunk + 1) * chunk_bytes};
        if (chunk == 0) {
            std::memcpy(staged, sent.data(), header / 2);
            std::memcpy(staged + header / 2, received.data(), header / 2);
        }
        std::int64_t start = header;
        for (std::size_t i = 1; i < size; ++i) {
            const std::size_t peer = (rank + i) % size;
            const Range part = common(range, {start, start + sent[peer]});
            if (part.length() > 0)
                copy_items(staged + (part.begin - range.begin),
                           static_cast<const std::byte *>(inputs[peer]) + (part.begin - start), part.length());
            start += sent[peer];
        }
    };
    const auto drain = [&](std::int64_t chunk, std::uint64_t number) {
        const Range range{chunk * chunk_bytes, (chunk + 1) * chunk_bytes};
        if (chunk == 0) {
            longest = header + read_parcels(number, starts);
            copy_items(static_cast<std::byte *>(outputs[rank]), static_cast<const std::byte *>(inputs[rank]),
                       sent[rank]);
        }
        for (std::size_t i = 1; i < size; ++i) {
            const std::size_t peer = (rank + size - i) % size; // for which this rank is the i-th
            const std::int64_t start = header + starts[peer];
            const Range part = common(range, {start, start + received[peer]});
            if (part.length() > 0)
                fetch_items(static_cast<std::byte *>(outputs[peer]) + (part.begin - start),
                            slot(peer, number) + (part.begin - range.begin), part.length());
        }
    };
    exchange(1, fill, drain);
    const std::int64_t others = divide_up(longest, chunk_bytes) - 1;
    if (others > 0)
        exchange(
            others, [&](std::int64_t chunk, std::byte *staged) { fill(chunk + 1, staged); },
            [&](std::int64_t chunk, std::uint64_t number) { drain(chunk + 1, number); });
}

std::int64_t Communicator::read_parcels(std::uint64_t number, std::vector<std::int64_t> &starts) {
    const std::size_t rank = board_.rank(), size = board_.size();
    std::vector<std::int64_t> sizes(2 * size * size); // sent and received, of each rank
    for (std::size_t peer = 0; peer < size; ++peer)
        std::memcpy(&sizes[2 * size * peer], slot(peer, number), 2 * size * sizeof(std::int64_t));
    const auto sent = [&](std::size_t from, std::size_t to) { return sizes[2 * size * from + to]; };
    const auto received = [&](std::size_t from, std::size_t to) { return sizes[2 * size * to + size + from]; };
    std::int64_t longest = 0;
    for (std::size_t from = 0; from < size; ++from) {
        std::int64_t length = 0;
        for (std::size_t i = 0; i < size; ++i) {
            const std::size_t to = (from + i) % size;
            if (sent(from, to) != received(from, to)) {
                std::ostringstream text;
                text << "the ranks mean different sizes: " << board_.name(from) << " sends " << sent(from, to)
                     << " bytes to " << board_.name(to) << ", which expects " << received(from, to)
                     << "; give the output of one the size of the input of the other";
                board_.disagree(text.str());
            }
            if (to == rank) starts[from] = length;
            if (i > 0) length += sent(from, to);
        }
        longest = std::max(longest, length);
    }
    return longest;
}

} // namespace hybridpar

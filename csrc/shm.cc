#include "shm.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "check.h"

// Note [slots]
// Each rank stages its chunks in kSlots slots in turn, counting chunks on from one collective to the next. A rank
// fills chunk c + 1 before it awaits chunk c, so that others need not wait for it. When it fills chunk c + 1, all
// ranks have published c - 1, hence have done with c - 3: the slot of c + 1 - 4 is free. A rank may still read c - 2,
// c - 1 and c.
//
// Note [slices]
// The same for a reduction by slices, which publishes twice a chunk: A when its part is staged, B when its slice is
// summed, in the order A0 A1 B0 A2 B1 A3 B2 ... (A is published empty behind the last chunk). When a rank fills
// c + 1, all have published B of c - 2, so none reads the staged chunk c - 2 or one before it any more; when it
// writes the result of c, all have published A of c, so none reads the result of c - 3 or one before it any more.

namespace hybridpar {
namespace {

constexpr std::uint64_t kSlots = 4;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
// Up to this size one round in which every rank sums everything beats two rounds of slices, whoever takes part.
constexpr std::int64_t kSmallBytes = 16 << 10;

std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

std::int64_t divide_up(std::int64_t count, std::int64_t by) {
    return (count + by - 1) / by;
}

struct Range {
    std::int64_t begin, end;

    std::int64_t length() const {
        return end - begin;
    }
};

// The part of `count` elements that is rank's, in whole cache lines.
Range slice(std::int64_t count, std::size_t rank, std::size_t size, std::size_t item) {
    const auto line = static_cast<std::int64_t>(kLine / item);
    const std::int64_t length = divide_up(divide_up(count, static_cast<std::int64_t>(size)), line) * line;
    const std::int64_t begin = std::min(count, length * static_cast<std::int64_t>(rank));
    return {begin, std::min(count, begin + length)};
}

Range piece(std::int64_t count, std::int64_t chunk, std::int64_t chunk_count) {
    const std::int64_t begin = std::min(count, chunk * chunk_count);
    return {begin, std::min(count, begin + chunk_count)};
}

void copy_items(std::byte *target, const std::byte *source, std::int64_t count, std::size_t item = 1) {
    if (count > 0) std::memcpy(target, source, static_cast<std::size_t>(count) * item);
}

// The same from another rank's slot.
void fetch_items(std::byte *target, const std::byte *source, std::int64_t count, std::size_t item = 1) {
    if (count > 0) copy_shared(target, source, static_cast<std::size_t>(count) * item);
}

} // namespace

std::size_t communicator_bytes(std::size_t size, std::size_t chunk_bytes) {
    const std::size_t slice_bytes = round_up(divide_up(chunk_bytes, size), kLine) + kLine;
    return round_up(board_bytes(size), kPage) + size * kSlots * (chunk_bytes + slice_bytes);
}

Communicator::Communicator(std::byte *memory, std::size_t rank, std::vector<Process> processes, std::size_t chunk_bytes,
                           double timeout)
    : board_(memory, rank, std::move(processes), timeout), chunk_bytes_(chunk_bytes) {
    const std::size_t size = board_.size();
    check(chunk_bytes_ % 128 == 0 && chunk_bytes_ >= 128 * size, "expected chunks of a multiple of 128 bytes, ",
          128 * size, " at least, got ", chunk_bytes_);
    slice_bytes_ = round_up(divide_up(chunk_bytes_, size), kLine) + kLine;
    staging_ = memory + round_up(board_bytes(size), kPage);
    results_ = staging_ + size * kSlots * chunk_bytes_;
    sources_.resize(size);
    targets_.resize(size);
}

std::byte *Communicator::slot(std::size_t rank, std::uint64_t chunk) const {
    return staging_ + (rank * kSlots + chunk % kSlots) * chunk_bytes_;
}

std::byte *Communicator::result_slot(std::size_t rank, std::uint64_t chunk) const {
    return results_ + (rank * kSlots + chunk % kSlots) * slice_bytes_;
}

std::unique_lock<std::mutex> Communicator::enter() {
    board_.check_process();
    return std::unique_lock<std::mutex>(mutex_);
}

void Communicator::begin(Kind kind, std::int64_t count, DType dtype, Reduction reduction, std::size_t root,
                         std::uint64_t place) {
    const auto what = static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(dtype) << 8 |
                      static_cast<std::uint64_t>(reduction) << 16 | static_cast<std::uint64_t>(root) << 24;
    board_.announce({what, static_cast<std::uint64_t>(count), place});
}

void Communicator::check_agreement() {
    const std::size_t other = board_.first_disagreeing();
    if (other == board_.size()) return;
    board_.disagree("the ranks do different things: " + describe(board_.announced(board_.rank())) + " here, " +
                    describe(board_.announced(other)) + " on rank " + std::to_string(other) +
                    "; call the same collectives in the same order, with equal sizes, on every rank");
}

std::string Communicator::describe(const Announcement &announcement) const {
    constexpr const char *kinds[] = {"barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast"};
    constexpr const char *dtypes[] = {"float32", "float64", "bfloat16", "float16", "int64", "bytes"};
    constexpr const char *reductions[] = {"sum", "max", "min"};
    std::ostringstream text;
    const auto kind = static_cast<Kind>(announcement.what & 0xff);
    text << kinds[announcement.what & 0xff];
    if (kind == Kind::barrier) return text.str();
    if (kind == Kind::all_reduce) text << " (" << reductions[announcement.what >> 16 & 0xff] << ")";
    text << " of " << announcement.count << ' ' << dtypes[announcement.what >> 8 & 0xff];
    if (kind == Kind::broadcast) text << " from rank " << (announcement.what >> 24);
    if (announcement.place != 0) text << " in a shared bucket";
    return text.str();
}

// Note [slots]. fill(chunk, slot) stages this rank's part; drain(chunk, number) uses what every rank has staged.
template <typename Fill, typename Drain>
void Communicator::exchange(std::int64_t chunks, Fill fill, Drain drain) {
    const std::size_t rank = board_.rank();
    const std::uint32_t first = board_.step() + 1;
    const std::uint64_t number = chunk_;
    fill(0, slot(rank, number));
    board_.publish();
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (chunk + 1 < chunks) {
            fill(chunk + 1, slot(rank, number + chunk + 1));
            board_.publish();
        }
        board_.await_all(first + static_cast<std::uint32_t>(chunk));
        if (chunk == 0) check_agreement();
        drain(chunk, number + chunk);
    }
    chunk_ += chunks;
}

void Communicator::barrier() {
    const auto lock = enter();
    begin(Kind::barrier, 0, DType::uint8, Reduction::sum, 0, 0);
    exchange(1, [](std::int64_t, std::byte *) {}, [](std::int64_t, std::uint64_t) {});
}

void Communicator::all_reduce(void *data, std::int64_t count, DType dtype, Reduction reduction) {
    const auto lock = enter();
    auto *bytes = static_cast<std::byte *>(data);
    const std::int64_t total = count * static_cast<std::int64_t>(item_size(dtype));
    Buckets buckets{};
    if (const std::byte *base = find_buckets(bytes, total, buckets)) {
        const std::uint64_t offset = static_cast<std::uint64_t>(bytes - base) - board_.rank() * buckets.stride;
        begin(Kind::all_reduce, count, dtype, reduction, 0, std::uint64_t{buckets.number} << 40 | offset);
        if (total <= kSmallBytes) return reduce_staged(bytes, count, dtype, reduction);
        return reduce_in_place(bytes - board_.rank() * buckets.stride, buckets.stride, count, dtype, reduction);
    }
    begin(Kind::all_reduce, count, dtype, reduction, 0, 0);
    // Two ranks that both sum everything save a round; for the half types the sum costs more than the round.
    const bool is_half = dtype == DType::bfloat16 || dtype == DType::float16;
    if (total <= kSmallBytes || (board_.size() == 2 && !is_half))
        reduce_staged(bytes, count, dtype, reduction);
    else
        reduce_by_slices(bytes, count, dtype, reduction);
}

// Every rank stages everything and sums everything: one round a chunk.
void Communicator::reduce_staged(std::byte *data, std::int64_t count, DType dtype, Reduction reduction) {
    const std::size_t item = item_size(dtype);
    const auto chunk_count = static_cast<std::int64_t>(chunk_bytes_ / item);
    exchange(
        std::max<std::int64_t>(1, divide_up(count, chunk_count)),
        [&](std::int64_t chunk, std::byte *staged) {
            const Range range = piece(count, chunk, chunk_count);
            copy_items(staged, data + range.begin * item, range.length(), item);
        },
        [&](std::int64_t chunk, std::uint64_t number) {
            const Range range = piece(count, chunk, chunk_count);
            void *target = data + range.begin * item;
            for (std::size_t peer = 0; peer < board_.size(); ++peer)
                sources_[peer] = peer == board_.rank() ? target : slot(peer, number);
            reduce(sources_.data(), board_.size(), &target, 1, range.length(), dtype, reduction);
        });
}

// Note [slices]: every rank sums its slice of each chunk and shows the result to the others.
void Communicator::reduce_by_slices(std::byte *data, std::int64_t count, DType dtype, Reduction reduction) {
    const std::size_t item = item_size(dtype), rank = board_.rank(), size = board_.size();
    const auto chunk_count = static_cast<std::int64_t>(chunk_bytes_ / item);
    const std::int64_t chunks = divide_up(count, chunk_count);
    const std::uint32_t first = board_.step();
    const auto fill = [&](std::int64_t chunk) {
        const Range range = piece(count, chunk, chunk_count);
        const Range own = slice(range.length(), rank, size, item);
        const std::byte *source = data + range.begin * item;
        std::byte *staged = slot(rank, chunk_ + chunk);
        copy_items(staged, source, own.begin, item);
        copy_items(staged + own.end * item, source + own.end * item, range.length() - own.end, item);
    };
    const auto sum = [&](std::int64_t chunk) {
        const Range range = piece(count, chunk, chunk_count);
        const Range own = slice(range.length(), rank, size, item);
        std::byte *here = data + (range.begin + own.begin) * item;
        for (std::size_t peer = 0; peer < size; ++peer)
            sources_[peer] = peer == rank ? here : slot(peer, chunk_ + chunk) + own.begin * item;
        void *targets[] = {here, result_slot(rank, chunk_ + chunk)};
        reduce(sources_.data(), size, targets, 2, own.length(), dtype, reduction);
    };
    const auto collect = [&](std::int64_t chunk) {
        const Range range = piece(count, chunk, chunk_count);
        for (std::size_t i = 1; i < size; ++i) {
            const std::size_t peer = (rank + i) % size;
            const Range theirs = slice(range.length(), peer, size, item);
            fetch_items(data + (range.begin + theirs.begin) * item, result_slot(peer, chunk_ + chunk), theirs.length(),
                        item);
        }
    };
    fill(0);
    board_.publish();
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto steps = first + static_cast<std::uint32_t>(2 * chunk);
        if (chunk + 1 < chunks) fill(chunk + 1);
        board_.publish();
        board_.await_all(chunk == 0 ? first + 1 : steps);
        if (chunk == 0) check_agreement();
        sum(chunk);
        board_.publish();
        if (chunk > 0) {
            board_.await_all(steps + 1);
            collect(chunk - 1);
        }
    }
    board_.await_all(board_.step());
    collect(chunks - 1);
    chunk_ += chunks;
}

// Each rank sums its slice of all ranks' buckets and writes it into all of them.
void Communicator::reduce_in_place(std::byte *first, std::size_t stride, std::int64_t count, DType dtype,
                                   Reduction reduction) {
    const Range own = slice(count, board_.rank(), board_.size(), item_size(dtype));
    board_.publish();
    board_.await_all(board_.step());
    check_agreement();
    for (std::size_t peer = 0; peer < board_.size(); ++peer) {
        targets_[peer] = first + peer * stride + own.begin * item_size(dtype);
        sources_[peer] = targets_[peer];
    }
    reduce(sources_.data(), board_.size(), targets_.data(), board_.size(), own.length(), dtype, reduction);
    board_.publish();
    board_.await_all(board_.step());
}

void Communicator::all_gather(const std::vector<void *> &outputs, const std::vector<std::int64_t> &bytes,
                              const void *input) {
    const auto lock = enter();
    const std::size_t rank = board_.rank(), size = board_.size();
    check(outputs.size() == size && bytes.size() == size, "expected one output for each of ", size, " ranks, got ",
          outputs.size());
    const auto chunk_bytes = static_cast<std::int64_t>(chunk_bytes_);
    const std::int64_t longest = *std::max_element(bytes.begin(), bytes.end());
    begin(Kind::all_gather, std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}), DType::uint8, Reduction::sum,
          0, 0);
    const auto *mine = static_cast<const std::byte *>(input);
    exchange(
        std::max<std::int64_t>(1, divide_up(longest, chunk_bytes)),
        [&](std::int64_t chunk, std::byte *staged) {
            const Range range = piece(bytes[rank], chunk, chunk_bytes);
            copy_items(staged, mine + range.begin, range.length());
            if (outputs[rank] != input)
                copy_items(static_cast<std::byte *>(outputs[rank]) + range.begin, mine + range.begin, range.length());
        },
        [&](std::int64_t chunk, std::uint64_t number) {
            for (std::size_t i = 1; i < size; ++i) {
                const std::size_t peer = (rank + i) % size;
                const Range range = piece(bytes[peer], chunk, chunk_bytes);
                fetch_items(static_cast<std::byte *>(outputs[peer]) + range.begin, slot(peer, number), range.length());
            }
        });
}

void Communicator::reduce_scatter(void *output, const std::vector<const void *> &inputs,
                                  const std::vector<std::int64_t> &counts, DType dtype) {
    const auto lock = enter();
    const std::size_t item = item_size(dtype), rank = board_.rank(), size = board_.size();
    check(inputs.size() == size && counts.size() == size, "expected one input for each of ", size, " ranks, got ",
          inputs.size());
    // A slot holds a piece for each rank.
    const auto piece_count = static_cast<std::int64_t>(chunk_bytes_ / size / kLine * kLine / item);
    const std::int64_t longest = *std::max_element(counts.begin(), counts.end());
    begin(Kind::reduce_scatter, std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), dtype, Reduction::sum,
          0, 0);
    exchange(
        std::max<std::int64_t>(1, divide_up(longest, piece_count)),
        [&](std::int64_t chunk, std::byte *staged) {
            for (std::size_t peer = 0; peer < size; ++peer) {
                const Range range = piece(counts[peer], chunk, piece_count);
                const auto *source = static_cast<const std::byte *>(inputs[peer]);
                if (peer != rank)
                    copy_items(staged + peer * piece_count * item, source + range.begin * item, range.length(), item);
            }
        },
        [&](std::int64_t chunk, std::uint64_t number) {
            const Range range = piece(counts[rank], chunk, piece_count);
            for (std::size_t peer = 0; peer < size; ++peer)
                sources_[peer] = peer == rank ? static_cast<const std::byte *>(inputs[rank]) + range.begin * item
                                              : slot(peer, number) + rank * piece_count * item;
            void *target = static_cast<std::byte *>(output) + range.begin * item;
            reduce(sources_.data(), size, &target, 1, range.length(), dtype, Reduction::sum);
        });
}

void Communicator::broadcast(void *data, std::int64_t bytes, std::size_t root) {
    const auto lock = enter();
    check(root < board_.size(), "expected a root below ", board_.size(), ", got ", root);
    begin(Kind::broadcast, bytes, DType::uint8, Reduction::sum, root, 0);
    const bool sends = board_.rank() == root;
    const auto chunk_bytes = static_cast<std::int64_t>(chunk_bytes_);
    auto *mine = static_cast<std::byte *>(data);
    exchange(
        std::max<std::int64_t>(1, divide_up(bytes, chunk_bytes)),
        [&](std::int64_t chunk, std::byte *staged) {
            const Range range = piece(bytes, chunk, chunk_bytes);
            if (sends) copy_items(staged, mine + range.begin, range.length());
        },
        [&](std::int64_t chunk, std::uint64_t number) {
            const Range range = piece(bytes, chunk, chunk_bytes);
            if (!sends) fetch_items(mine + range.begin, slot(root, number), range.length());
        });
}

void Communicator::add_buckets(const std::byte *base, std::size_t stride, std::uint32_t number) {
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    buckets_.insert_or_assign(base, Buckets{stride, number});
}

void Communicator::drop_buckets(const std::byte *base) {
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    buckets_.erase(base);
}

const std::byte *Communicator::find_buckets(const std::byte *data, std::int64_t bytes, Buckets &found) {
    const std::lock_guard<std::mutex> lock(buckets_mutex_);
    const auto above = buckets_.upper_bound(data);
    if (above == buckets_.begin()) return nullptr;
    const auto &[base, buckets] = *std::prev(above);
    const std::byte *mine = base + board_.rank() * buckets.stride;
    if (data < mine || data + bytes > mine + buckets.stride) return nullptr;
    found = buckets;
    return base;
}

void Communicator::leave() {
    if (!board_.is_own_process()) return;
    board_.leave();
    const std::lock_guard<std::mutex> lock(mutex_);
}

} // namespace hybridpar

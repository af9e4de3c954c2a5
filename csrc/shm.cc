#include "shm.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "check.h"
#include "ranges.h"

// Note [buckets], in shm_buckets.cc, is about data that lies where all ranks can reach it.
//
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
// Note [parcels], in shm_parcels.cc, is about all-to-all.

namespace hybridpar {
namespace {

constexpr std::uint64_t kSlots = 4;
constexpr std::size_t kPage = 4096;
// Up to this size one round in which every rank sums everything beats two rounds of slices, whoever takes part.
constexpr std::int64_t kSmallBytes = 16 << 10;

// Tells lists of sizes apart, in 40 bits (FNV-1a).
std::uint64_t fingerprint(const std::vector<std::int64_t> &sizes) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const std::int64_t size : sizes)
        hash = (hash ^ static_cast<std::uint64_t>(size)) * 0x100000001b3;
    return hash >> 24;
}

// Where parts that lie one behind the other begin, else null. Empty ones may be anywhere.
template <typename Pointer>
const std::byte *joined(const std::vector<Pointer> &parts, const std::vector<std::int64_t> &counts, std::size_t item) {
    const std::byte *begin = nullptr, *end = nullptr;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        if (counts[i] == 0) continue;
        const auto *part = static_cast<const std::byte *>(parts[i]);
        if (begin == nullptr) begin = part;
        if (end != nullptr && part != end) return nullptr;
        end = part + counts[i] * item;
    }
    return begin;
}

} // namespace

std::size_t communicator_bytes(std::size_t size, std::size_t chunk_bytes) {
    const std::size_t slice_bytes = round_up(divide_up(chunk_bytes, size), kLine) + kLine;
    return round_up(board_bytes(size), kPage) + size * kSlots * (chunk_bytes + slice_bytes);
}

Communicator::Communicator(std::byte *memory, std::size_t rank, std::vector<Member> members, std::size_t chunk_bytes,
                           std::size_t cores, double timeout)
    : board_(memory, rank, std::move(members), cores, timeout), chunk_bytes_(chunk_bytes) {
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

void Communicator::begin(Kind kind, std::int64_t count, DType dtype, Reduction reduction, std::uint64_t detail,
                         std::uint64_t place) {
    const auto what = static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(dtype) << 8 |
                      static_cast<std::uint64_t>(reduction) << 16 | detail << 24;
    board_.announce({what, static_cast<std::uint64_t>(count), place});
}

void Communicator::check_agreement() {
    const std::size_t other = board_.first_disagreeing();
    if (other == board_.size()) return;
    const Announcement &ours = board_.announced(board_.rank()), &others = board_.announced(other);
    const std::string mine = describe(ours), theirs = describe(others);
    const char *beyond = ours.place == others.place ? ", in parts of other sizes" : ", at another place";
    board_.disagree("the ranks do different things: " + mine + " here, " + theirs + " on " + board_.name(other) +
                    (mine == theirs ? beyond : "") +
                    "; call the same collectives in the same order, with equal sizes, on every rank");
}

std::string Communicator::describe(const Announcement &announcement) const {
    constexpr const char *kinds[] = {"barrier",        "all_reduce", "all_gather",
                                     "reduce_scatter", "broadcast",  "all_to_all"};
    constexpr const char *dtypes[] = {"float32", "float64", "bfloat16", "float16", "int64", "bytes"};
    constexpr const char *reductions[] = {"sum", "max", "min"};
    std::ostringstream text;
    const auto kind = static_cast<Kind>(announcement.what & 0xff);
    text << kinds[announcement.what & 0xff];
    if (kind == Kind::barrier || kind == Kind::all_to_all) return text.str();
    if (kind == Kind::all_reduce) text << " (" << reductions[announcement.what >> 16 & 0xff] << ")";
    text << " of " << announcement.count << ' ' << dtypes[announcement.what >> 8 & 0xff];
    if (kind == Kind::broadcast) text << " from " << board_.name(announcement.what >> 24);
    if (announcement.place != 0) text << " in a shared bucket";
    return text.str();
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
    const Place place = find_place(bytes, total);
    begin(Kind::all_reduce, count, dtype, reduction, 0, place.key);
    // Two ranks that both sum everything save a round; for the half types the sum costs more than the round.
    const bool is_half = dtype == DType::bfloat16 || dtype == DType::float16;
    if (total <= kSmallBytes)
        reduce_staged(bytes, count, dtype, reduction);
    else if (place.key != 0)
        reduce_in_place(place, count, dtype, reduction);
    else if (board_.size() == 2 && !is_half)
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

void Communicator::all_gather(const std::vector<void *> &outputs, const std::vector<std::int64_t> &bytes,
                              const void *input) {
    const auto lock = enter();
    const std::size_t rank = board_.rank(), size = board_.size();
    check(outputs.size() == size && bytes.size() == size, "expected one output for each of ", size, " ranks, got ",
          outputs.size());
    const auto chunk_bytes = static_cast<std::int64_t>(chunk_bytes_);
    const std::int64_t longest = *std::max_element(bytes.begin(), bytes.end());
    const std::int64_t total = sum_of(bytes, size);
    const Place place = find_place(joined(outputs, bytes, 1), total);
    begin(Kind::all_gather, total, DType::uint8, Reduction::sum, fingerprint(bytes), place.key);
    if (place.key != 0 && total > kSmallBytes) return gather_in_place(place, bytes, input);
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
    const std::int64_t total = sum_of(counts, size) * static_cast<std::int64_t>(item);
    const Place place = find_place(joined(inputs, counts, item), total);
    begin(Kind::reduce_scatter, sum_of(counts, size), dtype, Reduction::sum, fingerprint(counts), place.key);
    if (place.key != 0 && total > kSmallBytes) return scatter_in_place(output, place, counts, dtype);
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

void Communicator::leave() {
    if (!board_.is_own_process()) return;
    board_.leave();
    const std::lock_guard<std::mutex> lock(mutex_);
}

} // namespace hybridpar

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "board.h"
#include "reduce.h"
#include "types.h"

namespace hybridpar {

// Collectives between ranks (processes or threads) of one host over memory that all of them have mapped.
//
// Every rank calls the same operations with the same counts, dtypes and roots; where they differ, all ranks throw
// Failure. Sums are taken in rank order, element by element, so that results do not depend on timing and every
// rank gets the same bits.
class Communicator {
  public:
    // `memory` holds communicator_bytes(...) bytes, zero before the first rank came, aligned to a page.
    // `chunk_bytes`, a multiple of 128, is what a rank stages at a time; `cores`, how many the ranks have together.
    Communicator(std::byte *memory, std::size_t rank, std::vector<Member> members, std::size_t chunk_bytes,
                 std::size_t cores, double timeout);

    void all_reduce(void *data, std::int64_t count, DType dtype, Reduction reduction);
    // outputs[r] has bytes[r] bytes and gets the input of rank r.
    void all_gather(const std::vector<void *> &outputs, const std::vector<std::int64_t> &bytes, const void *input);
    // inputs[r] has counts[r] elements; output gets the sum over the ranks of their inputs[rank].
    void reduce_scatter(void *output, const std::vector<const void *> &inputs, const std::vector<std::int64_t> &counts,
                        DType dtype);
    // inputs[r], sent[r] bytes long, goes to rank r; outputs[r] gets the received[r] bytes that are for this rank
    // there.
    void all_to_all(const std::vector<void *> &outputs, const std::vector<std::int64_t> &received,
                    const std::vector<const void *> &inputs, const std::vector<std::int64_t> &sent);
    void broadcast(void *data, std::int64_t bytes, std::size_t root);
    void barrier();

    // From now on memory in [base, base + size * stride) is known as buckets: every rank has it mapped somewhere, and
    // rank r's bucket begins at base + r * stride. All ranks give it the same number, not zero. Note [buckets].
    void add_buckets(const std::byte *base, std::size_t stride, std::uint32_t number);
    void drop_buckets(const std::byte *base);

    // Makes every rank's present and later calls fail, with `why` this rank cannot go on, if it says so. From any
    // thread.
    void abort(const std::string &why) {
        board_.abort(why);
    }
    // The last call: this rank will not come again. Returns when none of its calls is running any more.
    void leave();
    void set_poll(std::function<void()> poll) {
        board_.set_poll(std::move(poll));
    }

  private:
    struct Buckets {
        std::size_t stride;
        std::uint32_t number;
    };
    // Memory in this rank's bucket; the same in rank r's is at first + r * stride. The key, equal where ranks name the
    // same part of the same buckets, is 0 for memory in no bucket.
    struct Place {
        std::byte *first = nullptr;
        std::size_t stride = 0;
        std::uint64_t key = 0;

        std::byte *of(std::size_t rank) const {
            return first + rank * stride;
        }
    };
    enum class Kind : std::uint8_t { barrier, all_reduce, all_gather, reduce_scatter, broadcast, all_to_all };

    // One call at a time; none in a forked child, where the mutex may stay locked for ever.
    std::unique_lock<std::mutex> enter();
    // `detail`: the root, or what tells lists of sizes apart; 40 bits.
    void begin(Kind kind, std::int64_t count, DType dtype, Reduction reduction, std::uint64_t detail,
               std::uint64_t place);
    void check_agreement();
    std::string describe(const Announcement &announcement) const;
    template <typename Fill, typename Drain>
    void exchange(std::int64_t chunks, Fill fill, Drain drain);
    void reduce_staged(std::byte *data, std::int64_t count, DType dtype, Reduction reduction);
    void reduce_by_slices(std::byte *data, std::int64_t count, DType dtype, Reduction reduction);
    void reduce_in_place(const Place &place, std::int64_t count, DType dtype, Reduction reduction);
    void gather_in_place(const Place &place, const std::vector<std::int64_t> &bytes, const void *input);
    void scatter_in_place(void *output, const Place &place, const std::vector<std::int64_t> &counts, DType dtype);
    // Note [parcels]: reads the sizes from the first chunks. Gives how long the longest stream is behind them, and
    // where there this rank's part begins in each. Throws on every rank where a sender and a receiver mean different
    // sizes.
    std::int64_t read_parcels(std::uint64_t number, std::vector<std::int64_t> &starts);
    // The place of `bytes` bytes in this rank's buckets, if they lie in one.
    Place find_place(const void *data, std::int64_t bytes);
    std::byte *slot(std::size_t rank, std::uint64_t chunk) const;
    std::byte *result_slot(std::size_t rank, std::uint64_t chunk) const;

    Board board_;
    std::byte *staging_;
    std::byte *results_;
    std::size_t chunk_bytes_;
    std::size_t slice_bytes_;
    std::uint64_t chunk_ = 0;
    std::map<const std::byte *, Buckets> buckets_;
    std::mutex buckets_mutex_;
    std::vector<const void *> sources_;
    std::vector<void *> targets_;
    std::mutex mutex_;
};

// Note [slots], in shm.cc. fill(chunk, slot) stages this rank's part; drain(chunk, number) uses what every rank has
// staged.
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

// Memory that a communicator of that many ranks needs.
std::size_t communicator_bytes(std::size_t size, std::size_t chunk_bytes);

} // namespace hybridpar

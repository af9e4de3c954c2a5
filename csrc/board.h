#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridpar {

// A collective cannot be completed; the text says which rank is to blame. RuntimeError in Python.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What a rank says it is about to do. All ranks must say the same.
struct Announcement {
    std::uint64_t what, count, place;

    bool operator==(const Announcement &other) const {
        return what == other.what && count == other.count && place == other.place;
    }
};

// One of the ranks: its process as the system knows it (process ids are used again, together with the start time they
// are not), and its number in the whole job, by which errors name it.
struct Member {
    std::int64_t process, start, job_rank;
};

// When a process started, in clock ticks since boot; 0 if it is gone or dead, -1 where the system does not say.
std::int64_t process_start(std::int64_t id);

// Note [steps]
// Each rank owns one number in shared memory: how many steps it has completed. It only grows (modulo 2^32), so
// nothing is ever reset, and since all ranks take the same steps, "rank r has done its part" is "its number has
// reached mine". A collective begins with one wait for all ranks at least; so no rank is ever more than one
// collective ahead, and announcements need two places only.
//
// Note [waits]
// A wait spins for some microseconds, then offers its core to others, then sleeps until it is woken, for
// milliseconds at most. It does not spin where the rank that is waited for was last on the same core and so cannot
// go on meanwhile, nor where there are more ranks than cores. On a machine that others use, too, whoever waits
// without sleeping spends the time that the scheduler would give him when there is work, and a collective takes
// milliseconds. So offering is limited in time: when a stranger took the core, and kept it for his share of
// milliseconds, the wait sleeps; where only ranks want the cores, they change places in microseconds.
//
// Only the sleep looks whether ranks are still alive and whether the time is over, so that the usual, short wait
// costs no system call. Whoever finds that a rank is lost writes it into the abort word; all others read the same
// name there.
class Board {
  public:
    // `memory` is shared by all ranks, aligned to 128 bytes, board_bytes(size) long and zero before the first rank
    // came. `cores`: how many the ranks have together.
    Board(std::byte *memory, std::size_t rank, std::vector<Member> members, std::size_t cores, double timeout);

    std::size_t rank() const {
        return rank_;
    }
    std::size_t size() const {
        return members_.size();
    }

    // The last step that this rank has published.
    std::uint32_t step() const {
        return step_;
    }

    // False in a forked child, which shares the memory but is not the rank.
    bool is_own_process() const;
    // Throws if it is not.
    void check_process() const;
    // Begins a collective. Throws if an earlier one failed.
    void announce(const Announcement &announcement);
    // One more step is done: what was written before is visible to whoever awaits the step.
    void publish();
    // Returns when every rank has published `step`.
    void await_all(std::uint32_t step);
    // After the first await_all of a collective: the first rank that announced something else, or size().
    std::size_t first_disagreeing() const;
    const Announcement &announced(std::size_t rank) const;
    // Makes this and every later wait of every rank fail.
    [[noreturn]] void disagree(const std::string &reason);
    // The same from any thread. The other ranks' errors say why; a long text is cut off.
    void abort(const std::string &why);
    // "rank 5 (process 1234)"
    std::string name(std::size_t rank) const;
    // This rank will not come again; its own waits fail, too.
    void leave();
    // Called now and then by waits that sleep, on the main thread only; may throw.
    void set_poll(std::function<void()> poll) {
        poll_ = std::move(poll);
    }

  private:
    struct State;
    struct Shared;
    enum class Loss : std::uint32_t { aborted = 1, gone, left, late, disagreed };

    void await(std::size_t peer, std::uint32_t step);
    void await_slowly(std::size_t peer, std::uint32_t step);
    bool is_gone(std::size_t peer) const;
    void check_alive();
    void throw_if_aborted() const;
    void note_loss(Loss loss, std::size_t culprit);
    [[noreturn]] void fail(Loss loss, std::size_t culprit);
    std::string reason(Loss loss, std::size_t culprit) const;

    Shared *shared_;
    State *states_;
    std::size_t rank_;
    std::vector<Member> members_;
    double timeout_;
    int spins_;
    std::int64_t creator_;
    std::uint32_t step_ = 0;
    std::uint32_t collective_ = 0;
    std::atomic<bool> leaving_{false};
    std::mutex abort_mutex_;
    std::function<void()> poll_;
};

// Memory that a board of that many ranks needs.
std::size_t board_bytes(std::size_t size);

} // namespace hybridpar

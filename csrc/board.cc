#include "board.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <sstream>
#include <thread>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "check.h"

namespace hybridpar {
namespace {

constexpr std::size_t kWhyBytes = 384;

}

struct alignas(128) Board::State {
    std::atomic<std::uint32_t> step;
    std::atomic<std::uint32_t> sleepers;
    std::atomic<std::uint32_t> left;
    std::atomic<std::uint32_t> core; // on which the step was published
    // In the same cache line as the step, so that reading both costs one transfer between cores.
    Announcement announcements[2];
    // Why this rank gave up, written once, before the loss.
    alignas(128) char why[kWhyBytes];
};

struct alignas(128) Board::Shared {
    std::atomic<std::uint32_t> loss; // 0, or a Loss << 24 | culprit + 1
};

namespace {

using Clock = std::chrono::steady_clock;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "ranks in other processes see no lock of ours");

constexpr int kSpins = 1000;
constexpr auto kYielding = std::chrono::microseconds(200);
constexpr auto kLongestSleep = std::chrono::milliseconds(20);
constexpr auto kBetweenChecks = std::chrono::milliseconds(100);

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

bool reached(std::uint32_t step, std::uint32_t wanted) {
    return static_cast<std::int32_t>(step - wanted) >= 0;
}

// Until `word` differs from `seen`, or for kLongestSleep.
void sleep_on(std::atomic<std::uint32_t> &word, std::uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, std::chrono::nanoseconds(kLongestSleep).count()};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(200));
#endif
}

void wake(std::atomic<std::uint32_t> &word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// The core that this thread runs on, from 1; 0 where the system does not say.
std::uint32_t current_core() {
#if defined(__linux__)
    return static_cast<std::uint32_t>(sched_getcpu() + 1);
#else
    return 0;
#endif
}

bool on_main_thread() {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#else
    return false;
#endif
}

} // namespace

std::int64_t process_start(std::int64_t id) {
    if (kill(static_cast<pid_t>(id), 0) != 0 && errno == ESRCH) return 0;
#if defined(__linux__)
    char path[64], text[1024];
    std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(id));
    std::FILE *file = std::fopen(path, "r");
    if (file == nullptr) return errno == ENOENT || errno == ESRCH ? 0 : -1;
    const std::size_t length = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    text[length] = 0;
    // The name, in parentheses, may hold anything. Behind it: state, then numbers, of which the 19th is the start.
    const char *field = std::strrchr(text, ')');
    if (field == nullptr) return length == 0 ? 0 : -1;
    const char state = field[1] == 0 ? 0 : field[2];
    if (state == 'Z' || state == 'X') return 0;
    field += 3;
    for (int i = 0; i < 18 && field != nullptr; ++i)
        field = std::strchr(field + 1, ' ');
    return field == nullptr ? -1 : std::strtoll(field, nullptr, 10);
#else
    return -1;
#endif
}

std::size_t board_bytes(std::size_t size) {
    return 128 + (128 + kWhyBytes) * size; // as State and Shared say, checked in the constructor
}

Board::Board(std::byte *memory, std::size_t rank, std::vector<Member> members, std::size_t cores, double timeout)
    : shared_(reinterpret_cast<Shared *>(memory)), states_(reinterpret_cast<State *>(memory + sizeof(Shared))),
      rank_(rank), members_(std::move(members)), timeout_(timeout), creator_(getpid()) {
    static_assert(sizeof(State) == 128 + kWhyBytes && sizeof(Shared) == 128);
    check(rank_ < size(), "expected a rank below ", size(), ", got ", rank_);
    spins_ = size() <= cores ? kSpins : 0;
}

bool Board::is_own_process() const {
    return getpid() == creator_;
}

void Board::check_process() const {
    if (!is_own_process())
        throw Failure("process " + std::to_string(getpid()) + " is a fork of the rank, process " +
                      std::to_string(creator_) + ", and has no part in its lanes; start it by spawn");
}

void Board::announce(const Announcement &announcement) {
    if (leaving_.load()) throw Failure("this rank has closed the lane");
    throw_if_aborted();
    ++collective_;
    states_[rank_].announcements[collective_ & 1] = announcement;
}

void Board::publish() {
    State &mine = states_[rank_];
    mine.core.store(current_core(), std::memory_order_relaxed);
    mine.step.store(++step_);
    if (mine.sleepers.load() != 0) wake(mine.step);
}

void Board::await_all(std::uint32_t step) {
    for (std::size_t i = 1; i < size(); ++i)
        await((rank_ + i) % size(), step);
}

void Board::await(std::size_t peer, std::uint32_t step) {
    const State &theirs = states_[peer];
    if (reached(theirs.step.load(std::memory_order_acquire), step)) return;
    const std::uint32_t core = current_core();
    if (core == 0 || core != theirs.core.load(std::memory_order_relaxed))
        for (int spin = 0; spin < spins_; ++spin) {
            pause();
            if (reached(theirs.step.load(std::memory_order_acquire), step)) return;
        }
    await_slowly(peer, step);
}

void Board::await_slowly(std::size_t peer, std::uint32_t step) {
    State &theirs = states_[peer];
    const auto start = Clock::now();
    auto next_check = start + kBetweenChecks;
    for (bool yields = true;;) {
        const bool left = theirs.left.load();
        if (reached(theirs.step.load(), step)) return;
        if (leaving_.load()) throw Failure("this rank has closed the lane");
        throw_if_aborted();
        if (left) fail(Loss::left, peer);
        if (yields) {
            sched_yield();
            yields = Clock::now() - start < kYielding;
            continue;
        }
        theirs.sleepers.fetch_add(1);
        const std::uint32_t seen = theirs.step.load();
        if (!reached(seen, step)) sleep_on(theirs.step, seen);
        theirs.sleepers.fetch_sub(1);
        const auto now = Clock::now();
        if (now < next_check) continue;
        next_check = now + kBetweenChecks;
        if (reached(theirs.step.load(), step)) return;
        check_alive();
        if (now - start > std::chrono::duration<double>(timeout_)) fail(Loss::late, peer);
        if (!poll_ || !on_main_thread()) continue;
        try {
            poll_();
        } catch (...) {
            abort("interrupted"); // in the middle of a collective: nothing more can be sent
            throw;
        }
    }
}

bool Board::is_gone(std::size_t peer) const {
    const Member &member = members_[peer];
    if (member.process == creator_) return false;
    const std::int64_t start = process_start(member.process);
    return start == 0 || (start > 0 && member.start > 0 && start != member.start);
}

void Board::check_alive() {
    for (std::size_t peer = 0; peer < size(); ++peer)
        if (is_gone(peer)) fail(Loss::gone, peer);
}

std::size_t Board::first_disagreeing() const {
    for (std::size_t peer = 0; peer < size(); ++peer)
        if (!(announced(peer) == announced(rank_))) return peer;
    return size();
}

const Announcement &Board::announced(std::size_t rank) const {
    return states_[rank].announcements[collective_ & 1];
}

void Board::disagree(const std::string &reason) {
    note_loss(Loss::disagreed, rank_);
    throw Failure(reason);
}

void Board::abort(const std::string &why) {
    if (!is_own_process() || leaving_.load()) return;
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (shared_->loss.load() != 0) return;
    std::size_t length = std::min(why.size(), kWhyBytes - 1); // zero behind it, as all memory at first
    while (length < why.size() && length > 0 && (why[length] & 0xc0) == 0x80)
        --length; // not within a character of UTF-8
    std::memcpy(states_[rank_].why, why.data(), length);
    note_loss(Loss::aborted, rank_);
}

void Board::leave() {
    leaving_.store(true);
    states_[rank_].left.store(1);
    for (std::size_t peer = 0; peer < size(); ++peer)
        wake(states_[peer].step);
}

void Board::throw_if_aborted() const {
    const std::uint32_t loss = shared_->loss.load(std::memory_order_acquire);
    if (loss != 0) throw Failure(reason(static_cast<Loss>(loss >> 24), (loss & 0xffffff) - 1));
}

void Board::note_loss(Loss loss, std::size_t culprit) {
    std::uint32_t none = 0;
    shared_->loss.compare_exchange_strong(none, static_cast<std::uint32_t>(loss) << 24 |
                                                    static_cast<std::uint32_t>(culprit + 1));
    for (std::size_t peer = 0; peer < size(); ++peer)
        wake(states_[peer].step);
}

void Board::fail(Loss loss, std::size_t culprit) {
    note_loss(loss, culprit);
    throw Failure(reason(loss, culprit));
}

std::string Board::reason(Loss loss, std::size_t culprit) const {
    std::ostringstream text;
    switch (loss) {
    case Loss::aborted:
        text << "another rank left: " << name(culprit) << " cannot go on";
        if (states_[culprit].why[0] != 0) text << ": " << states_[culprit].why;
        break;
    case Loss::gone:
        text << name(culprit) << " is gone";
        // One of them may have ended because of another.
        for (std::size_t peer = 0; peer < size(); ++peer)
            if (peer != culprit && is_gone(peer)) text << "; " << name(peer) << " too";
        break;
    case Loss::left: text << name(culprit) << " has closed its lane"; break;
    case Loss::late: text << name(culprit) << " did not come within " << timeout_ << " s"; break;
    case Loss::disagreed: text << name(culprit) << " found that the ranks do different things; see its error"; break;
    }
    return text.str();
}

std::string Board::name(std::size_t rank) const {
    const Member &member = members_[rank];
    return "rank " + std::to_string(member.job_rank) + " (process " + std::to_string(member.process) + ")";
}

} // namespace hybridpar

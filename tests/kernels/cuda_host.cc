// Runs kernels thread by thread, each on a stack of its own, and counts what a device would not forgive.
#include "cuda_host.h"

#include <ucontext.h>

#include <array>
#include <vector>

namespace host {
namespace {

constexpr unsigned kWarp = 32, kMostThreads = 256;
constexpr std::size_t kStack = 256 << 10;

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStack);
    Waits waits;
    std::uint64_t given;
};

std::vector<Thread> &all_threads() {
    static std::vector<Thread> threads(kMostThreads);
    return threads;
}
ucontext_t scheduler;
const std::function<void()> *running;
// Threads that wait for others which never come, and addresses that do not suit the type that is read or written there.
long long stuck = 0, misaligned = 0;

void enter() {
    (*running)();
    wait(Waits::done);
}

void resume(Thread &thread, unsigned number) {
    threadIdx.x = number;
    swapcontext(&scheduler, &thread.context);
}

// Those that have all come where they wait for each other go on.
bool release(std::vector<Thread> &threads, unsigned begin, unsigned end, Waits why) {
    for (unsigned i = begin; i < end; ++i)
        if (threads[i].waits != why) return false;
    for (unsigned i = begin; i < end; ++i)
        threads[i].waits = Waits::for_nothing;
    return true;
}

bool finished(const std::vector<Thread> &threads, unsigned count) {
    for (unsigned i = 0; i < count; ++i)
        if (threads[i].waits != Waits::done) return false;
    return true;
}

void run_block(unsigned count, unsigned long long step) {
    std::vector<Thread> &threads = all_threads();
    for (unsigned i = 0; i < count; ++i) {
        getcontext(&threads[i].context);
        threads[i].context.uc_stack = {threads[i].stack.data(), 0, kStack};
        threads[i].context.uc_link = &scheduler;
        threads[i].waits = Waits::for_nothing;
        makecontext(&threads[i].context, enter, 0);
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (unsigned long long i = 0; i < count; ++i) {
            const auto number = static_cast<unsigned>((count - 1 + i * step) % count);
            if (threads[number].waits == Waits::for_nothing) resume(threads[number], number);
        }
        for (unsigned begin = 0; begin < count; begin += kWarp)
            moved |= release(threads, begin, begin + kWarp, Waits::for_warp);
        moved |= release(threads, 0, count, Waits::for_block);
    }
    if (!finished(threads, count)) ++stuck;
}

} // namespace

void wait(Waits why) {
    Thread &thread = all_threads()[threadIdx.x];
    thread.waits = why;
    swapcontext(&thread.context, &scheduler);
}

std::uint64_t exchange(std::uint64_t bits, unsigned mask) {
    std::vector<Thread> &threads = all_threads();
    threads[threadIdx.x].given = bits;
    wait(Waits::for_warp);
    const std::uint64_t taken = threads[threadIdx.x ^ mask].given;
    wait(Waits::for_warp);
    return taken;
}

void launch(unsigned blocks, unsigned threads, unsigned long long step, const std::function<void()> &kernel) {
    gridDim.x = blocks;
    blockDim.x = threads;
    running = &kernel;
    for (unsigned long long i = 0; i < blocks; ++i) {
        blockIdx.x = static_cast<unsigned>((blocks - 1 + i * step) % blocks);
        run_block(threads, step);
    }
}

} // namespace host

// Blocks since the last call whose threads waited for others that never came.
extern "C" long long take_stuck() {
    const long long count = host::stuck;
    host::stuck = 0;
    return count;
}

// For checks of these stand-ins themselves: 64 threads of which some do not come where the others wait.
extern "C" void wait_without(unsigned missing, bool for_block) {
    host::launch(1, 64, 1, [&] {
        if (threadIdx.x != missing) host::wait(for_block ? host::Waits::for_block : host::Waits::for_warp);
    });
}

extern "C" void shuffle(int mask, long long step, long long *found) {
    host::launch(1, 64, static_cast<unsigned long long>(step), [&] {
        found[threadIdx.x] = hybridpar::cuda::shuffle_xor(static_cast<long long>(threadIdx.x), mask);
    });
}

// Compiled with -fsanitize=alignment, which calls this where an address does not suit the type that is read or written
// there: a device stops at such an access, this processor does not.
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) {
    ++host::misaligned;
}
extern "C" long long count_misaligned() {
    return host::misaligned;
}

#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include <pthread.h>

namespace hybridpar {
namespace {

// One call of in_parallel. Whoever takes part draws parts until there are none.
struct Job {
    const std::function<void(std::int64_t)> &work;
    const std::int64_t parts;
    std::int64_t wanted; // threads that may still join
    std::int64_t inside = 0;
    std::atomic<std::int64_t> next{0};

    void run() {
        for (std::int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;)
            work(part);
    }
};

// Threads that are made when first wanted, and sleep between jobs.
class Pool {
  public:
    void run(std::int64_t parts, std::int64_t threads, const std::function<void(std::int64_t)> &work) {
        Job job{work, parts, threads - 1};
        std::unique_lock lock(mutex_);
        const auto place = jobs_.insert(jobs_.end(), &job);
        wanted_ += job.wanted;
        for (; threads_ < wanted_; ++threads_)
            std::thread([this] { serve(); }).detach();
        lock.unlock();
        work_.notify_all();
        job.run();
        lock.lock();
        wanted_ -= threads - 1;
        jobs_.erase(place); // nobody joins any more
        done_.wait(lock, [&] { return job.inside == 0; });
    }

  private:
    [[noreturn]] void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job *job) { return job->wanted > 0; });
            if (open == jobs_.end()) {
                work_.wait(lock);
                continue;
            }
            Job &job = **open;
            --job.wanted;
            ++job.inside;
            lock.unlock();
            job.run();
            lock.lock();
            if (--job.inside == 0) done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::list<Job *> jobs_;
    std::int64_t threads_ = 0, wanted_ = 0; // that there are; that all jobs together may use
};

// Never destroyed: its threads may outlive everything. A forked child has none of them, and takes a new one.
Pool *current = nullptr;

Pool &pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Pool;
        pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
    });
    return *current;
}

} // namespace

void in_parallel(std::int64_t parts, std::int64_t threads, const std::function<void(std::int64_t)> &work) {
    threads = std::min(threads, parts);
    if (threads > 1) return pool().run(parts, threads, work);
    for (std::int64_t part = 0; part < parts; ++part)
        work(part);
}

} // namespace hybridpar

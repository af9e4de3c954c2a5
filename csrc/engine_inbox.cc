#include "engine_inbox.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <unistd.h>

#include "check.h"

namespace hybridpar {
namespace {

constexpr int kHost[] = {1, 0};         // a Context: device type and number
constexpr int kCpuPrioritized = 3;      // FnProperty: by threads for what is short
constexpr int kAsync = 4;               // at once by who pushes it, if it can run; else by threads that compute
constexpr int kDense = 0;               // NDArrayStorageType
constexpr int kHostTypes[] = {1, 3, 5}; // memory of the host: plain, pinned, shared

// CallbackOnComplete (mxnet/engine.h).
struct Completion {
    void (*callback)(void *engine, void *block, const void *error);
    void *engine, *block;

    // dmlc::Error is a std::runtime_error and nothing more. The engine copies it.
    void operator()(const char *error) const {
        if (error == nullptr) {
            callback(engine, block, nullptr);
            return;
        }
        const std::runtime_error thrown(error);
        callback(engine, block, &thrown);
    }
};

// The beginning of a DLManagedTensor (dlpack.h).
struct Managed {
    void *data;
    std::int32_t device_type, device_id, dimensions;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

} // namespace

struct EngineInbox::State {
    // A function that holds an array until what `copy` has its memory from is complete.
    struct Follower {
        Completion completion;
        void *data;
        Copy copy;
    };
    // What waits for `complete`.
    struct Waiting {
        Completion completion;
        std::vector<std::pair<void *, Copy>> back; // from the copy's memory to this
        std::vector<Follower> followers;
    };

    explicit State(const EngineApi &functions) : api(functions) {}

    void require(int status) const {
        if (status != 0) throw std::runtime_error(api.last_error());
    }

    // Memory of an array that the running function holds. It never waits, as MXNDArrayGetData may.
    void *data(const Copy &copy) const {
        void *pack = nullptr;
        require(api.to_dlpack(copy.handle, &pack));
        const Managed found = *static_cast<const Managed *>(pack);
        api.delete_dlpack(pack);
        check(found.dimensions == 1 && found.shape != nullptr, "expected an array of one dimension");
        return static_cast<std::byte *>(found.data) + found.byte_offset;
    }

    const EngineApi api;
    std::mutex mutex;
    std::condition_variable work, idle;
    std::vector<Arrival> arrived;
    std::unordered_set<std::int64_t> queued; // given to the engine, and not run or skipped yet
    std::unordered_map<std::int64_t, Waiting> waiting;
    std::size_t inside = 0; // functions with a number, in the engine
    bool stopped = false, failed = false;
    std::string why;
};

namespace {

// A function on its way through the engine, which deletes it.
struct Ticket {
    std::shared_ptr<EngineInbox::State> state;
    std::int64_t number; // 0: nobody completes it
    std::vector<EngineInbox::Copy> copies;
    bool back, ran;
};

// A function that follows another one, on its way through the engine, which deletes it.
struct FollowerTicket {
    // Guarded by the mutex of the state. Whoever pushes it gives it up if it did not run at once.
    enum class Fate { open, follows, refused };

    std::shared_ptr<EngineInbox::State> state;
    std::shared_ptr<Fate> fate;
    std::int64_t number;
    EngineInbox::Copy copy;
};

void put(EngineInbox::State &state, EngineInbox::Arrival arrival) {
    const bool first = state.arrived.empty();
    state.arrived.push_back(std::move(arrival));
    if (first) state.work.notify_one();
}

// Fills `back` with where each array's memory is.
void copy_in(const Ticket &ticket, std::vector<std::pair<void *, EngineInbox::Copy>> &back) {
    for (const auto &copy : ticket.copies) {
        void *data = ticket.state->data(copy);
        std::memcpy(copy.memory, data, copy.bytes);
        if (ticket.back) back.emplace_back(data, copy);
    }
}

void run(void *, void *completion_address, void *parameter) {
    auto *ticket = static_cast<Ticket *>(parameter);
    const auto state = ticket->state; // the ticket may go as soon as it is completed
    const Completion completion = *static_cast<const Completion *>(completion_address);
    ticket->ran = true;
    EngineInbox::State::Waiting entry{completion, {}, {}};
    std::string problem;
    bool stopped = false;
    try {
        copy_in(*ticket, entry.back);
    } catch (const std::exception &error) {
        problem = error.what();
    }
    {
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->queued.erase(ticket->number);
        stopped = state->stopped;
        if (stopped) {
            problem = state->why;
        } else {
            state->waiting.emplace(ticket->number, std::move(entry));
            put(*state, {ticket->number, true, problem});
        }
    }
    if (stopped) completion(problem.c_str());
}

void run_copies(void *, void *completion_address, void *parameter) {
    auto *ticket = static_cast<Ticket *>(parameter);
    const Completion completion = *static_cast<const Completion *>(completion_address);
    std::string problem;
    try {
        for (const auto &copy : ticket->copies)
            std::memcpy(ticket->state->data(copy), copy.memory, copy.bytes);
    } catch (const std::exception &error) {
        problem = std::string("MXNetError: ") + error.what();
    }
    completion(problem.empty() ? nullptr : problem.c_str());
}

// Copies now or when the other function is complete; otherwise leaves the array alone.
void run_follower(void *, void *completion_address, void *parameter) {
    auto *ticket = static_cast<FollowerTicket *>(parameter);
    const auto state = ticket->state;
    const Completion completion = *static_cast<const Completion *>(completion_address);
    {
        using Fate = FollowerTicket::Fate;
        const std::lock_guard<std::mutex> lock(state->mutex);
        const auto found = state->waiting.find(ticket->number);
        const bool follows = found != state->waiting.end();
        Fate &fate = *ticket->fate;
        if (fate == Fate::open && !state->failed && state->queued.count(ticket->number) == 0) {
            try {
                void *data = state->data(ticket->copy);
                if (follows) {
                    found->second.followers.push_back({completion, data, ticket->copy});
                } else {
                    std::memcpy(data, ticket->copy.memory, ticket->copy.bytes);
                }
                fate = Fate::follows;
            } catch (const std::exception &) {
                fate = Fate::refused; // the way that is taken instead says what is wrong
            }
        } else if (fate == Fate::open) {
            fate = Fate::refused;
        }
        if (follows && fate == Fate::follows) return;
    }
    completion(nullptr);
}

void discard_follower(void *parameter) {
    const std::unique_ptr<FollowerTicket> ticket(static_cast<FollowerTicket *>(parameter));
    ticket->state->api.free(ticket->copy.handle);
}

// Ends what holds arrays, after the memory has its values.
void finish(const EngineInbox::State::Waiting &one, const char *error) {
    for (const auto &follower : one.followers) {
        if (error == nullptr) std::memcpy(follower.data, follower.copy.memory, follower.copy.bytes);
        follower.completion(error);
    }
    if (error == nullptr)
        for (const auto &[data, copy] : one.back)
            std::memcpy(data, copy.memory, copy.bytes);
    one.completion(error);
}

void discard(void *parameter) {
    const std::unique_ptr<Ticket> ticket(static_cast<Ticket *>(parameter));
    EngineInbox::State &state = *ticket->state;
    for (const auto &copy : ticket->copies)
        state.api.free(copy.handle);
    if (ticket->number == 0) return;
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (!ticket->ran) {
        state.queued.erase(ticket->number);
        state.failed = true;
        if (!state.stopped) put(state, {ticket->number, false, {}});
    }
    if (--state.inside == 0) state.idle.notify_all();
}

void give(const std::shared_ptr<EngineInbox::State> &state, EngineApi::Run function, std::int64_t number,
          const int &property, EngineInbox::Terms &terms) {
    auto ticket = std::make_unique<Ticket>(Ticket{state, number, {}, terms.back, false});
    try {
        for (auto copy : terms.copies) {
            // Its owner may free the array before the function has run.
            state->require(state->api.share(copy.handle, &copy.handle));
            ticket->copies.push_back(copy);
        }
        if (number != 0) {
            const std::lock_guard<std::mutex> lock(state->mutex);
            ++state->inside;
            state->queued.insert(number);
        }
    } catch (...) {
        for (const auto &copy : ticket->copies)
            state->api.free(copy.handle);
        throw;
    }
    // From here on it is the engine's, which deletes it.
    state->require(state->api.push(function, ticket.release(), discard, kHost, terms.reads.data(),
                                   static_cast<int>(terms.reads.size()), terms.writes.data(),
                                   static_cast<int>(terms.writes.size()), &property, terms.priority, terms.name.c_str(),
                                   false));
}

} // namespace

EngineInbox::EngineInbox(const EngineApi &api) : state_(std::make_shared<State>(api)), process_(getpid()) {}

EngineInbox::~EngineInbox() {
    // In a forked child a thread that does not exist there may hold the lock, and wait for what would be destroyed.
    if (process_ != getpid()) new std::shared_ptr<State>(std::move(state_));
}

bool EngineInbox::is_plain(EngineApi::Handle array, EngineApi::Handle like) const {
    const EngineApi &api = state_->api;
    int storage = 0, device = 0, number = 0;
    state_->require(api.storage(array, &storage));
    if (storage != kDense) return false;
    state_->require(api.context(array, &device, &number));
    bool host = false;
    for (const int known : kHostTypes)
        host |= device == known;
    if (!host) return false;
    int dtypes[2] = {}, lengths[2] = {};
    const EngineApi::Handle arrays[] = {array, like};
    for (int i = 0; i < 2; ++i) {
        int dimensions = 0;
        const int *shape = nullptr;
        state_->require(api.dtype(arrays[i], &dtypes[i]));
        state_->require(api.shape(arrays[i], &dimensions, &shape));
        if (dimensions != 1) return false;
        lengths[i] = shape[0];
    }
    return dtypes[0] == dtypes[1] && lengths[0] == lengths[1];
}

void EngineInbox::push(std::int64_t number, Terms terms) {
    check(number > 0, "expected a number above 0, got ", number);
    give(state_, run, number, kAsync, terms);
}

void EngineInbox::push_copies(Terms terms) {
    give(state_, run_copies, 0, kCpuPrioritized, terms);
}

bool EngineInbox::follow(std::int64_t number, Copy copy) {
    const auto fate = std::make_shared<FollowerTicket::Fate>(FollowerTicket::Fate::open);
    auto ticket = std::make_unique<FollowerTicket>(FollowerTicket{state_, fate, number, copy});
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->failed || state_->queued.count(number) != 0) return false;
    }
    // Its owner may free the array before the other function is complete.
    state_->require(state_->api.share(copy.handle, &ticket->copy.handle));
    state_->require(state_->api.push(run_follower, ticket.release(), discard_follower, kHost, nullptr, 0, &copy.handle,
                                     1, &kAsync, 0, "hybridpar pull", false));
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (*fate == FollowerTicket::Fate::open) *fate = FollowerTicket::Fate::refused;
    return *fate == FollowerTicket::Fate::follows;
}

bool EngineInbox::wait() {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->work.wait(lock, [&] { return state_->stopped || !state_->arrived.empty(); });
    return !state_->stopped;
}

std::vector<EngineInbox::Arrival> EngineInbox::take() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return std::exchange(state_->arrived, {});
}

std::size_t EngineInbox::complete(const std::vector<std::int64_t> &numbers, const char *error) {
    std::vector<State::Waiting> found;
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->failed |= error != nullptr;
        for (const auto number : numbers) {
            auto node = state_->waiting.extract(number);
            if (!node.empty()) found.push_back(std::move(node.mapped()));
        }
    }
    for (const auto &one : found)
        finish(one, error);
    return found.size();
}

bool EngineInbox::wait_idle(double seconds) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    const std::chrono::duration<double> limit(seconds);
    return state_->idle.wait_for(lock, limit, [&] { return state_->inside == 0; });
}

void EngineInbox::stop(const std::string &why) {
    std::unordered_map<std::int64_t, State::Waiting> left;
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->stopped) return;
        state_->stopped = state_->failed = true;
        state_->why = why;
        left.swap(state_->waiting);
        state_->arrived.clear();
        state_->work.notify_all();
    }
    for (const auto &[number, one] : left)
        finish(one, why.c_str());
}

} // namespace hybridpar

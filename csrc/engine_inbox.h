#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hybridpar {

// What is used of MXNet's C interface (mxnet/c_api.h), by address: no header of MXNet is needed.
struct EngineApi {
    using Handle = void *;
    using Run = void (*)(void *context, void *completion, void *parameter);
    using Delete = void (*)(void *parameter);

    // MXEnginePushAsyncND
    int (*push)(Run, void *parameter, Delete, const void *context, Handle *reads, int, Handle *writes, int,
                const void *property, int priority, const char *name, bool wait);
    int (*share)(Handle, Handle *);                 // MXShallowCopyNDArray
    int (*free)(Handle);                            // MXNDArrayFree
    int (*to_dlpack)(Handle, void **);              // MXNDArrayToDLPack
    int (*delete_dlpack)(void *);                   // MXNDArrayCallDLPackDeleter
    int (*shape)(Handle, int *, const int **);      // MXNDArrayGetShapeEx
    int (*dtype)(Handle, int *);                    // MXNDArrayGetDType
    int (*context)(Handle, int *type, int *number); // MXNDArrayGetContext
    int (*storage)(Handle, int *);                  // MXNDArrayGetStorageType
    const char *(*last_error)();                    // MXGetLastError
};

// Functions of MXNet's engine that hold arrays until somebody completes them, and copies between arrays.
//
// They run on threads of the engine, which never need the interpreter: what has run is put here, and one thread takes
// it, as much as there is. Every call may come from any thread. Calls of MXNet that fail throw std::runtime_error.
class EngineInbox {
  public:
    // A function that has run, and now holds its arrays; or that was skipped, and has ended.
    struct Arrival {
        std::int64_t number;
        bool ran;
        std::string problem; // why its copies could not be made, if not empty
    };
    // Between the array `handle` and memory that the function holds by another array.
    struct Copy {
        EngineApi::Handle handle;
        void *memory;
        std::size_t bytes;
    };
    struct Terms {
        std::vector<EngineApi::Handle> reads, writes;
        std::vector<Copy> copies;
        bool back = false; // whether copies are made back when it is completed without an error
        int priority = 0;
        std::string name;
    };
    struct State;

    explicit EngineInbox(const EngineApi &api);
    ~EngineInbox();
    EngineInbox(const EngineInbox &) = delete;
    EngineInbox &operator=(const EngineInbox &) = delete;

    // Whether an array is dense, in memory of the host and of one dimension, with the dtype and length of another one.
    bool is_plain(EngineApi::Handle array, EngineApi::Handle like) const;

    // A function that copies from arrays and then waits here for `complete`. `number`: above 0, used once.
    void push(std::int64_t number, Terms terms);

    // A function that copies into arrays and ends.
    void push_copies(Terms terms);

    // Copies into an array when function `number`, which has run and holds the copy's memory, is complete; now, if it
    // is already. Returns at once. False, and the array stays as it is, if the function has not run yet, or the array
    // is in use, or any function has failed: `push_copies` serves then. The memory must keep its values meanwhile.
    bool follow(std::int64_t number, Copy copy);

    // Returns when there is something to take (true), or after `stop` (false).
    bool wait();
    std::vector<Arrival> take();

    // How many were there to be completed: those that have arrived and were not completed before.
    std::size_t complete(const std::vector<std::int64_t> &numbers, const char *error);

    // Whether no function with a number is in MXNet's engine, now or within this time.
    bool wait_idle(double seconds);

    // From now on functions complete with this error as they run, and those that wait here do so now.
    void stop(const std::string &why);

  private:
    std::shared_ptr<State> state_;
    std::int64_t process_;
};

} // namespace hybridpar

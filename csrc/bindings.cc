#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_arrivals.h"
#include "bindings_head.h"
#include "check.h"
#include "engine_inbox.h"
#include "exponents.h"
#include "pack.h"
#include "shm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridpar {
namespace {

using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::int64_t kMaxDimensions = 64;

DType dtype_of(std::int64_t code) {
    check(code >= 0 && code < kDTypes, "expected a dtype code below ", int{kDTypes}, ", got ", code);
    return static_cast<DType>(code);
}

// Reads `geometry[begin:]` = dimensions, shape..., strides... into `tensor`; the shape must hold its count.
void set_geometry(Tensor &tensor, const Int64s &geometry, std::int64_t begin, std::size_t position) {
    const auto length = static_cast<std::int64_t>(geometry.shape(0));
    check(begin < length, "expected a geometry offset below ", length, ", got ", begin, " at position ", position);
    const std::int64_t *numbers = geometry.data() + begin;
    const std::int64_t dimensions = numbers[0];
    check(dimensions >= 1 && dimensions <= kMaxDimensions && begin + 1 + 2 * dimensions <= length, "expected 1 to ",
          kMaxDimensions, " dimensions inside the geometry array, got ", dimensions, " at position ", position);
    std::int64_t count = 1;
    for (std::int64_t i = 0; i < dimensions; ++i) {
        const std::int64_t extent = numbers[1 + i];
        check(extent >= 0 && (extent == 0 || count <= tensor.count / extent), "expected a shape of ", tensor.count,
              " elements, got a larger or negative one at position ", position);
        count *= extent;
    }
    check(count == tensor.count, "expected a shape of ", tensor.count, " elements, got ", count, " at position ",
          position);
    tensor.dimensions = dimensions;
    tensor.shape = numbers + 1;
    tensor.strides = numbers + 1 + dimensions;
}

std::vector<Tensor> tensors_of(const Int64s &pointers, const Int64s &counts, const Codes &dtypes,
                               const Int64s &geometry_at, const Int64s &geometry) {
    const std::size_t size = pointers.shape(0);
    check(counts.shape(0) == size && dtypes.shape(0) == size, "expected ", size, " counts and dtypes, got ",
          counts.shape(0), " and ", dtypes.shape(0));
    const bool has_strided = geometry_at.shape(0) != 0;
    check(!has_strided || geometry_at.shape(0) == size, "expected no geometry offset or ", size, ", got ",
          geometry_at.shape(0));
    std::vector<Tensor> tensors(size);
    for (std::size_t i = 0; i < size; ++i) {
        const auto address = static_cast<std::uintptr_t>(pointers.data()[i]);
        tensors[i] = {
            reinterpret_cast<void *>(address), counts.data()[i], dtype_of(dtypes.data()[i]), 0, nullptr, nullptr};
        if (has_strided && geometry_at.data()[i] >= 0 && tensors[i].count > 0)
            set_geometry(tensors[i], geometry, geometry_at.data()[i], i);
    }
    return tensors;
}

Bucket bucket_of(std::uintptr_t pointer, std::int64_t count, std::int64_t dtype) {
    check(count >= 0, "expected a bucket of zero or more elements, got ", count);
    return {reinterpret_cast<void *>(pointer), count, dtype_of(dtype)};
}

DType reduced_dtype_of(std::int64_t code) {
    check(code >= 0 && code < kReducedDTypes, "expected a dtype code below ", int{kReducedDTypes}, ", got ", code);
    return static_cast<DType>(code);
}

Reduction reduction_of(std::int64_t code) {
    check(code >= 0 && code < kReductions, "expected a reduction code below ", int{kReductions}, ", got ", code);
    return static_cast<Reduction>(code);
}

template <typename Pointer>
std::vector<Pointer> pointers_of(const Int64s &addresses) {
    std::vector<Pointer> pointers(addresses.shape(0));
    for (std::size_t i = 0; i < pointers.size(); ++i)
        pointers[i] = reinterpret_cast<Pointer>(static_cast<std::uintptr_t>(addresses.data()[i]));
    return pointers;
}

std::vector<std::int64_t> sizes_of(const Int64s &sizes) {
    for (std::size_t i = 0; i < sizes.shape(0); ++i)
        check(sizes.data()[i] >= 0, "expected sizes of zero or more, got ", sizes.data()[i], " for rank ", i);
    return {sizes.data(), sizes.data() + sizes.shape(0)};
}

// A communicator, and how many threads are inside one of its calls, on the way back into Python included.
struct SharedMemory {
    Communicator communicator;
    std::atomic<int> inside{0};

    // The work without the lock of the interpreter; the count falls when the thread has it again.
    template <typename Work>
    void call(Work work) {
        ++inside;
        struct Leave {
            std::atomic<int> &count;
            ~Leave() {
                --count;
            }
        } const leave{inside};
        const nb::gil_scoped_release release;
        work(communicator);
    }
};

void raise_pending_signals() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void make_shared_memory(SharedMemory *self, std::uintptr_t memory, std::size_t rank, const Int64s &processes,
                        const Int64s &starts, const Int64s &job_ranks, std::size_t chunk_bytes, std::size_t cores,
                        double timeout) {
    const std::size_t size = processes.shape(0);
    check(starts.shape(0) == size && job_ranks.shape(0) == size, "expected a start time and a job rank for each of ",
          size, " processes, got ", starts.shape(0), " and ", job_ranks.shape(0));
    std::vector<Member> members(size);
    for (std::size_t i = 0; i < size; ++i)
        members[i] = {processes.data()[i], starts.data()[i], job_ranks.data()[i]};
    new (self)
        SharedMemory{{reinterpret_cast<std::byte *>(memory), rank, std::move(members), chunk_bytes, cores, timeout}};
    self->communicator.set_poll(raise_pending_signals);
}

void bind_shared_memory(nb::module_ &module) {
    module.def("process_start", &process_start, "process"_a);
    module.def("communicator_bytes", &communicator_bytes, "size"_a, "chunk_bytes"_a);

    nb::class_<SharedMemory>(module, "Communicator")
        .def("__init__", &make_shared_memory, "memory"_a, "rank"_a, "processes"_a.noconvert(), "starts"_a.noconvert(),
             "job_ranks"_a.noconvert(), "chunk_bytes"_a, "cores"_a, "timeout"_a)
        .def(
            "all_reduce",
            [](SharedMemory &self, std::uintptr_t data, std::int64_t count, std::int64_t dtype,
               std::int64_t reduction) {
                self.call([&](Communicator &communicator) {
                    communicator.all_reduce(reinterpret_cast<void *>(data), count, reduced_dtype_of(dtype),
                                            reduction_of(reduction));
                });
            },
            "data"_a, "count"_a, "dtype"_a, "reduction"_a)
        .def(
            "all_gather",
            [](SharedMemory &self, const Int64s &outputs, const Int64s &bytes, std::uintptr_t input) {
                self.call([&](Communicator &communicator) {
                    communicator.all_gather(pointers_of<void *>(outputs), sizes_of(bytes),
                                            reinterpret_cast<const void *>(input));
                });
            },
            "outputs"_a.noconvert(), "bytes"_a.noconvert(), "input"_a)
        .def(
            "reduce_scatter",
            [](SharedMemory &self, std::uintptr_t output, const Int64s &inputs, const Int64s &counts,
               std::int64_t dtype) {
                self.call([&](Communicator &communicator) {
                    communicator.reduce_scatter(reinterpret_cast<void *>(output), pointers_of<const void *>(inputs),
                                                sizes_of(counts), reduced_dtype_of(dtype));
                });
            },
            "output"_a, "inputs"_a.noconvert(), "counts"_a.noconvert(), "dtype"_a)
        .def(
            "all_to_all",
            [](SharedMemory &self, const Int64s &outputs, const Int64s &received, const Int64s &inputs,
               const Int64s &sent) {
                self.call([&](Communicator &communicator) {
                    communicator.all_to_all(pointers_of<void *>(outputs), sizes_of(received),
                                            pointers_of<const void *>(inputs), sizes_of(sent));
                });
            },
            "outputs"_a.noconvert(), "received"_a.noconvert(), "inputs"_a.noconvert(), "sent"_a.noconvert())
        .def(
            "broadcast",
            [](SharedMemory &self, std::uintptr_t data, std::int64_t bytes, std::size_t root) {
                self.call([&](Communicator &communicator) {
                    communicator.broadcast(reinterpret_cast<void *>(data), bytes, root);
                });
            },
            "data"_a, "bytes"_a, "root"_a)
        .def("barrier", [](SharedMemory &self) { self.call([](Communicator &c) { c.barrier(); }); })
        .def(
            "add_buckets",
            [](SharedMemory &self, std::uintptr_t base, std::size_t stride, std::uint32_t number) {
                self.communicator.add_buckets(reinterpret_cast<const std::byte *>(base), stride, number);
            },
            "base"_a, "stride"_a, "number"_a)
        .def(
            "drop_buckets",
            [](SharedMemory &self, std::uintptr_t base) {
                self.communicator.drop_buckets(reinterpret_cast<const std::byte *>(base));
            },
            "base"_a)
        .def(
            "abort", [](SharedMemory &self, const std::string &why) { self.communicator.abort(why); }, "why"_a)
        .def("leave", [](SharedMemory &self) { self.call([](Communicator &c) { c.leave(); }); })
        .def_prop_ro("calls_inside", [](const SharedMemory &self) { return self.inside.load(); });
}

using Addresses = std::vector<std::uintptr_t>;

template <typename Function>
void set_function(Function *&function, std::uintptr_t address) {
    check(address != 0, "expected the address of a function, got 0");
    function = reinterpret_cast<Function *>(address);
}

void make_engine_inbox(EngineInbox *self, const Addresses &functions) {
    check(functions.size() == 10, "expected the addresses of 10 functions, got ", functions.size());
    EngineApi api{};
    set_function(api.push, functions[0]);
    set_function(api.share, functions[1]);
    set_function(api.free, functions[2]);
    set_function(api.to_dlpack, functions[3]);
    set_function(api.delete_dlpack, functions[4]);
    set_function(api.shape, functions[5]);
    set_function(api.dtype, functions[6]);
    set_function(api.context, functions[7]);
    set_function(api.storage, functions[8]);
    set_function(api.last_error, functions[9]);
    new (self) EngineInbox(api);
}

std::vector<void *> handles_of(const Addresses &addresses) {
    std::vector<void *> handles(addresses.size());
    for (std::size_t i = 0; i < handles.size(); ++i)
        handles[i] = reinterpret_cast<void *>(addresses[i]);
    return handles;
}

// `copied`: handle, address and bytes of each, one behind the other.
EngineInbox::Terms engine_terms(const Addresses &reads, const Addresses &writes, const Addresses &copied, bool back,
                                int priority, const std::string &name) {
    check(copied.size() % 3 == 0, "expected handle, address and bytes of each copy, got ", copied.size(), " numbers");
    EngineInbox::Terms terms{handles_of(reads), handles_of(writes), {}, back, priority, name};
    for (std::size_t i = 0; i < copied.size(); i += 3)
        terms.copies.push_back(
            {reinterpret_cast<void *>(copied[i]), reinterpret_cast<void *>(copied[i + 1]), copied[i + 2]});
    return terms;
}

void bind_engine_inbox(nb::module_ &module) {
    // Calls that give functions to the engine, or complete one, only queue work: they keep the interpreter.
    nb::class_<EngineInbox>(module, "EngineInbox")
        .def("__init__", &make_engine_inbox, "functions"_a)
        .def(
            "is_plain",
            [](const EngineInbox &self, std::uintptr_t array, std::uintptr_t like) {
                return self.is_plain(reinterpret_cast<void *>(array), reinterpret_cast<void *>(like));
            },
            "array"_a, "like"_a)
        .def(
            "push",
            [](EngineInbox &self, std::int64_t number, const Addresses &reads, const Addresses &writes,
               const Addresses &copied, bool back, int priority, const std::string &name) {
                self.push(number, engine_terms(reads, writes, copied, back, priority, name));
            },
            "number"_a, "reads"_a, "writes"_a, "copied"_a, "back"_a, "priority"_a, "name"_a)
        .def(
            "push_copies",
            [](EngineInbox &self, const Addresses &reads, const Addresses &writes, const Addresses &copied,
               int priority, const std::string &name) {
                self.push_copies(engine_terms(reads, writes, copied, false, priority, name));
            },
            "reads"_a, "writes"_a, "copied"_a, "priority"_a, "name"_a)
        .def(
            "follow",
            [](EngineInbox &self, std::int64_t number, std::uintptr_t array, std::uintptr_t address,
               std::size_t bytes) {
                return self.follow(number, {reinterpret_cast<void *>(array), reinterpret_cast<void *>(address), bytes});
            },
            "number"_a, "array"_a, "address"_a, "bytes"_a)
        .def(
            "wait", [](EngineInbox &self) { return self.wait(); }, nb::call_guard<nb::gil_scoped_release>())
        .def("take",
             [](EngineInbox &self) {
                 nb::list taken;
                 for (const auto &arrival : self.take())
                     taken.append(nb::make_tuple(arrival.number, arrival.ran, arrival.problem));
                 return taken;
             })
        .def(
            "complete",
            [](EngineInbox &self, const std::vector<std::int64_t> &numbers, const std::string &error) {
                return self.complete(numbers, error.empty() ? nullptr : error.c_str());
            },
            "numbers"_a, "error"_a)
        .def(
            "wait_idle", [](EngineInbox &self, double seconds) { return self.wait_idle(seconds); }, "seconds"_a,
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "stop", [](EngineInbox &self, const std::string &why) { self.stop(why); }, "why"_a,
            nb::call_guard<nb::gil_scoped_release>());
}

void bind_exponents(nb::module_ &module) {
    module.def(
        "compressed_bound",
        [](std::int64_t count, std::int64_t dtype) { return compressed_bound(count, dtype_of(dtype)); }, "count"_a,
        "dtype"_a);
    module.def(
        "compress_exponents",
        [](std::uintptr_t values, std::int64_t count, std::int64_t dtype, std::uintptr_t target) {
            return compress_exponents(reinterpret_cast<const void *>(values), count, dtype_of(dtype),
                                      reinterpret_cast<std::uint8_t *>(target));
        },
        "values"_a, "count"_a, "dtype"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "expand_exponents",
        [](std::uintptr_t source, std::size_t bytes, std::uintptr_t values, std::int64_t count, std::int64_t dtype,
           bool add) {
            expand_exponents(reinterpret_cast<const std::uint8_t *>(source), bytes, reinterpret_cast<void *>(values),
                             count, dtype_of(dtype), add);
        },
        "source"_a, "bytes"_a, "values"_a, "count"_a, "dtype"_a, "add"_a, nb::call_guard<nb::gil_scoped_release>());
}

} // namespace
} // namespace hybridpar

NB_MODULE(_native, module) {
    using namespace hybridpar;

    // Objects that an uncaught exception still holds when the interpreter ends are no leak.
    nb::set_leak_warnings(false);
    module.attr("FLOAT32") = static_cast<int>(DType::float32);
    module.attr("FLOAT64") = static_cast<int>(DType::float64);
    module.attr("BFLOAT16") = static_cast<int>(DType::bfloat16);
    module.attr("FLOAT16") = static_cast<int>(DType::float16);
    module.attr("INT64") = static_cast<int>(DType::int64);
    module.attr("UINT8") = static_cast<int>(DType::uint8);
    bind_shared_memory(module);
    bind_engine_inbox(module);
    bind_exponents(module);
    bind_arrivals(module);
    bind_head(module);

    module.def(
        "pack",
        [](const Int64s &pointers, const Int64s &counts, const Codes &dtypes, const Int64s &geometry_at,
           const Int64s &geometry, std::uintptr_t bucket, std::int64_t bucket_count, std::int64_t bucket_dtype,
           double scale) {
            const auto tensors = tensors_of(pointers, counts, dtypes, geometry_at, geometry);
            const Bucket target = bucket_of(bucket, bucket_count, bucket_dtype);
            const nb::gil_scoped_release release;
            return pack(tensors.data(), tensors.size(), target, scale);
        },
        "pointers"_a.noconvert(), "counts"_a.noconvert(), "dtypes"_a.noconvert(), "geometry_at"_a.noconvert(),
        "geometry"_a.noconvert(), "bucket"_a, "bucket_count"_a, "bucket_dtype"_a, "scale"_a);

    module.def(
        "unpack",
        [](std::uintptr_t bucket, std::int64_t bucket_count, std::int64_t bucket_dtype, const Int64s &pointers,
           const Int64s &counts, const Codes &dtypes, const Int64s &geometry_at, const Int64s &geometry, double scale) {
            const auto tensors = tensors_of(pointers, counts, dtypes, geometry_at, geometry);
            const Bucket source = bucket_of(bucket, bucket_count, bucket_dtype);
            const nb::gil_scoped_release release;
            return unpack(source, tensors.data(), tensors.size(), scale);
        },
        "bucket"_a, "bucket_count"_a, "bucket_dtype"_a, "pointers"_a.noconvert(), "counts"_a.noconvert(),
        "dtypes"_a.noconvert(), "geometry_at"_a.noconvert(), "geometry"_a.noconvert(), "scale"_a);
}

#include "bindings_head.h"

#include <cstdint>

#include "check.h"
#include "initial.h"
#include "margin_softmax.h"
#include "row_update.h"
#include "sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridpar {
namespace {

template <typename Value = void>
Value *at(std::uintptr_t address) {
    return reinterpret_cast<Value *>(address);
}

DType dtype_of(std::int64_t code) {
    check(code >= 0 && code < kDTypes, "expected a dtype code below ", int{kDTypes}, ", got ", code);
    return static_cast<DType>(code);
}

void set_chunk(Chunk *self, std::uintptr_t products, std::int64_t dtype, std::int64_t classes, std::int64_t batch,
               std::uintptr_t inverse_norms, std::uintptr_t bias, double scale) {
    check(classes >= 0 && batch >= 0, "expected a chunk of zero or more classes and samples, got ", classes, " and ",
          batch);
    new (self) Chunk{at(products), dtype_of(dtype), classes, batch, at(inverse_norms), at(bias), scale};
}

void set_rows(Rows *self, std::uintptr_t weight, std::int64_t dtype, std::int64_t width, std::int64_t count,
              std::uintptr_t indices, std::int64_t first, std::uintptr_t inverse_norms) {
    check(width >= 0 && count >= 0 && first >= 0, "expected a width, a count and a first row of zero or more, got ",
          width, ", ", count, " and ", first);
    new (self)
        Rows{at(weight), dtype_of(dtype), width, count, at<const std::int64_t>(indices), first, at(inverse_norms)};
}

void bind_margin_softmax(nb::module_ &module) {
    nb::class_<Chunk>(module, "Chunk")
        .def("__init__", &set_chunk, "products"_a, "dtype"_a, "classes"_a, "batch"_a, "inverse_norms"_a, "bias"_a,
             "scale"_a);
    nb::class_<OwnSamples>(module, "OwnSamples")
        .def(
            "__init__",
            [](OwnSamples *self, std::int64_t count, std::uintptr_t classes, std::uintptr_t samples,
               std::uintptr_t values) {
                new (self)
                    OwnSamples{count, at<const std::int64_t>(classes), at<const std::int64_t>(samples), at(values)};
            },
            "count"_a, "classes"_a, "samples"_a, "values"_a);
    module.def(
        "add_exponentials",
        [](const Chunk &chunk, const OwnSamples &own, std::uintptr_t weights, std::uintptr_t maximum,
           std::uintptr_t total, std::uintptr_t rescale, std::int64_t threads) {
            const nb::gil_scoped_release release;
            add_exponentials(chunk, own, at(weights), at(maximum), at(total), at(rescale), threads);
        },
        "chunk"_a, "own"_a, "weights"_a, "maximum"_a, "total"_a, "rescale"_a, "threads"_a);
    module.def(
        "to_probabilities",
        [](const Chunk &chunk, const OwnSamples &own, std::uintptr_t probabilities, std::uintptr_t maximum,
           std::uintptr_t log_total, std::uintptr_t counts, std::uintptr_t sums, std::int64_t threads) {
            const nb::gil_scoped_release release;
            to_probabilities(chunk, own, at(probabilities), at(maximum), at(log_total), at(counts), at(sums), threads);
        },
        "chunk"_a, "own"_a, "probabilities"_a, "maximum"_a, "log_total"_a, "counts"_a, "sums"_a, "threads"_a);
}

void bind_policies(nb::module_ &module) {
    nb::class_<Gradient>(module, "Gradient")
        .def(
            "__init__",
            [](Gradient *self, std::uintptr_t values, std::int64_t dtype, double factor) {
                new (self) Gradient{at(values), dtype_of(dtype), factor};
            },
            "values"_a, "dtype"_a, "factor"_a);
    nb::class_<State>(module, "State")
        .def(
            "__init__",
            [](State *self, std::uintptr_t values, std::int64_t dtype) {
                new (self) State{at(values), dtype_of(dtype)};
            },
            "values"_a, "dtype"_a);
    nb::class_<Rounding>(module, "Rounding").def(nb::init<bool, std::uint64_t>(), "stochastic"_a, "seed"_a);
    nb::class_<Sgd>(module, "Sgd")
        .def(nb::init<double, double, double, bool>(), "rate"_a, "momentum"_a, "decay"_a, "nesterov"_a);
    nb::class_<AdamW>(module, "AdamW")
        .def(nb::init<double, double, double, double, double>(), "rate"_a, "first"_a, "second"_a, "epsilon"_a,
             "decay"_a);
    nb::class_<Adagrad>(module, "Adagrad").def(nb::init<double, double, double>(), "rate"_a, "epsilon"_a, "decay"_a);
}

void bind_rows(nb::module_ &module) {
    nb::class_<Rows>(module, "Rows")
        .def("__init__", &set_rows, "weight"_a, "dtype"_a, "width"_a, "count"_a, "indices"_a, "first"_a,
             "inverse_norms"_a);
    module.def(
        "load_rows",
        [](const Rows &rows, std::uintptr_t target, std::int64_t dtype, std::int64_t threads) {
            const DType target_dtype = dtype_of(dtype);
            const nb::gil_scoped_release release;
            load_rows(rows, at(target), target_dtype, threads);
        },
        "rows"_a, "target"_a, "dtype"_a, "threads"_a);
    module.def("measure_rows", &measure_rows, "rows"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "project_gradient",
        [](const Rows &rows, const Gradient &gradient, std::uintptr_t target, std::int64_t threads) {
            const nb::gil_scoped_release release;
            project_gradient(rows, gradient, at(target), threads);
        },
        "rows"_a, "gradient"_a, "target"_a, "threads"_a);
    module.def("step_sgd", &step_sgd, "rows"_a, "gradient"_a, "momentum"_a, "policy"_a, "rounding"_a, "threads"_a,
               nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "step_adamw",
        [](const Rows &rows, const Gradient &gradient, const State &first, const State &second, std::uintptr_t steps,
           const AdamW &policy, const Rounding &rounding, std::int64_t threads) {
            const nb::gil_scoped_release release;
            step_adamw(rows, gradient, first, second, at<std::int64_t>(steps), policy, rounding, threads);
        },
        "rows"_a, "gradient"_a, "first"_a, "second"_a, "steps"_a, "policy"_a, "rounding"_a, "threads"_a);
    module.def(
        "step_adagrad",
        [](const Rows &rows, const Gradient &gradient, std::uintptr_t sums, const Adagrad &policy,
           const Rounding &rounding, std::int64_t threads) {
            const nb::gil_scoped_release release;
            step_adagrad(rows, gradient, at(sums), policy, rounding, threads);
        },
        "rows"_a, "gradient"_a, "sums"_a, "policy"_a, "rounding"_a, "threads"_a);
    module.def(
        "advance_rows",
        [](const Rows &rows, const State &momentum, std::uintptr_t matrices, const Rounding &rounding,
           std::int64_t threads) {
            const nb::gil_scoped_release release;
            advance_rows(rows, momentum, at<const double>(matrices), rounding, threads);
        },
        "rows"_a, "momentum"_a, "matrices"_a, "rounding"_a, "threads"_a);
}

void bind_sample(nb::module_ &module) {
    module.def(
        "draw_with",
        [](std::uintptr_t kept, std::int64_t kept_count, std::int64_t size, std::int64_t count, std::uint64_t seed,
           std::uintptr_t result) {
            check(kept_count >= 0 && count >= 0 && count <= size - kept_count, "expected at most ", size - kept_count,
                  " numbers to draw, got ", count);
            const nb::gil_scoped_release release;
            draw_with(at<const std::int64_t>(kept), kept_count, size, count, seed, at<std::int64_t>(result));
        },
        "kept"_a, "kept_count"_a, "size"_a, "count"_a, "seed"_a, "result"_a);
}

void bind_initial(nb::module_ &module) {
    module.def(
        "draw_normal_rows",
        [](std::uintptr_t classes, std::int64_t count, std::int64_t width, std::uint64_t seed, double deviation,
           std::int64_t dtype, std::uintptr_t rows, std::int64_t threads) {
            check(count >= 0 && width >= 0, "expected zero or more rows and columns, got ", count, " and ", width);
            const DType rows_dtype = dtype_of(dtype);
            const nb::gil_scoped_release release;
            draw_normal_rows(at<const std::int64_t>(classes), count, width, seed, deviation, rows_dtype, at(rows),
                             threads);
        },
        "classes"_a, "count"_a, "width"_a, "seed"_a, "deviation"_a, "dtype"_a, "rows"_a, "threads"_a);
}

} // namespace

void bind_head(nb::module_ &module) {
    bind_initial(module);
    bind_margin_softmax(module);
    bind_policies(module);
    bind_rows(module);
    bind_sample(module);
}

} // namespace hybridpar

#include "bindings_arrivals.h"

#include <cstdint>
#include <vector>

#include <nanobind/stl/vector.h>

#include "arrivals.h"
#include "check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridpar {
namespace {

// With a switch for the hooks.
struct CountedArrivals : Arrivals {
    bool counting = false;
};

bool has_no_gradient(nb::handle parameter) {
    static PyObject *const name = PyUnicode_InternFromString("grad");
    const nb::object gradient = nb::steal(PyObject_GetAttr(parameter.ptr(), name));
    if (!gradient.is_valid()) throw nb::python_error();
    return gradient.is_none();
}

// See `Arrivals.hook` in _native.pyi.
nb::object make_hook(nb::handle_t<CountedArrivals> self, std::int64_t index, nb::object parameter,
                     nb::object otherwise) {
    // One object for each parameter, with all that it looks at close together.
    struct Hook {
        nb::object self;
        CountedArrivals &arrivals;
        std::int64_t index;
        nb::object parameter, otherwise;

        nb::object operator()(const nb::tuple &gradients) const {
            check(gradients.size() == 1, "expected the one gradient of an accumulator, got ", gradients.size());
            if (nb::handle(gradients[0]).is_none()) return nb::none();
            if (arrivals.counting && arrivals.leaves_bucket_open(index) && has_no_gradient(parameter)) {
                arrivals.add(index);
                return nb::none();
            }
            otherwise(index, parameter);
            return nb::none();
        }
    };
    auto &arrivals = nb::cast<CountedArrivals &>(self);
    return nb::cpp_function(Hook{nb::borrow(self), arrivals, index, std::move(parameter), std::move(otherwise)});
}

} // namespace

void bind_arrivals(nb::module_ &module) {
    nb::class_<CountedArrivals>(module, "Arrivals")
        .def(nb::init<>())
        .def_rw("counting", &CountedArrivals::counting)
        .def(
            "arrange", [](CountedArrivals &self, const std::vector<std::int64_t> &buckets) { self.arrange(buckets); },
            "buckets"_a)
        .def(
            "__contains__", [](const CountedArrivals &self, std::int64_t tensor) { return self.has(tensor); },
            "tensor"_a)
        .def(
            "add", [](CountedArrivals &self, std::int64_t tensor) { return self.add(tensor); }, "tensor"_a)
        .def(
            "count", [](const CountedArrivals &self, std::int64_t bucket) { return self.count(bucket); }, "bucket"_a)
        .def(
            "clear", [](CountedArrivals &self, std::int64_t bucket) { self.clear(bucket); }, "bucket"_a)
        .def("hook", &make_hook, "index"_a, "parameter"_a, "otherwise"_a);
}

} // namespace hybridpar

#include "bindings_arrivals.h"

#include <cstdint>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "arrivals.h"
#include "check.h"
#include "tensor_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridpar {
namespace {

// With a switch for the hooks.
struct CountedArrivals : Arrivals {
    bool counting = false;
};

nb::object gradient_of(nb::handle parameter) {
    static PyObject *const name = PyUnicode_InternFromString("grad");
    nb::object gradient = nb::steal(PyObject_GetAttr(parameter.ptr(), name));
    if (!gradient.is_valid()) throw nb::python_error();
    return gradient;
}

nb::list mark_gradients(const nb::list &parameters, const nb::str &name, nb::handle mark) {
    nb::list others;
    for (const nb::handle parameter : parameters) {
        const nb::object gradient = gradient_of(parameter);
        if (gradient.is_none()) continue;
        const nb::object attributes = nb::steal(PyObject_GenericGetDict(gradient.ptr(), nullptr));
        PyObject *const present =
            attributes.is_valid() ? PyDict_SetDefault(attributes.ptr(), name.ptr(), mark.ptr()) : nullptr;
        if (present == nullptr) throw nb::python_error();
        if (present != mark.ptr()) others.append(parameter);
    }
    return others;
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
            if (arrivals.counting && arrivals.leaves_bucket_open(index) && gradient_of(parameter).is_none()) {
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

using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64Out = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

DType dtype_of(std::int64_t code) {
    check(code >= 0 && code < kDTypes, "expected a dtype code below ", int{kDTypes}, ", got ", code);
    return static_cast<DType>(code);
}

class TensorReader {
  public:
    explicit TensorReader(nb::handle exchange) {
        exchange_ = static_cast<const DlExchange *>(PyCapsule_GetPointer(exchange.ptr(), kDlCapsule));
        if (exchange_ == nullptr) throw nb::python_error();
        check(exchange_->header.major == kDlMajor, "expected DLPack ", kDlMajor, ", got ", exchange_->header.major);
        check(exchange_->tensor_from_object != nullptr, "expected DLPack's view of an object, got none");
    }

    bool fit(const nb::list &tensors, std::int64_t dtype_code, const Int64s &shapes) const {
        const DType dtype = dtype_of(dtype_code);
        const std::int64_t *next = shapes.data(), *const end = next + shapes.shape(0);
        DlTensor found{};
        for (const nb::handle tensor : tensors) {
            check(next < end && *next >= 0 && *next < end - next, "expected a shape for each of ", tensors.size(),
                  " tensors, got fewer");
            if (!read(tensor, found) || !is_plain(found, dtype) || !has_shape(found, next + 1, *next)) return false;
            next += 1 + *next;
        }
        return next == end;
    }

    bool find(const nb::list &tensors, std::int64_t dtype_code, const Int64s &counts, const Int64Out &addresses) const {
        const DType dtype = dtype_of(dtype_code);
        const std::size_t size = tensors.size();
        check(counts.shape(0) == size && addresses.shape(0) == size, "expected ", size, " counts and addresses, got ",
              counts.shape(0), " and ", addresses.shape(0));
        DlTensor found{};
        for (std::size_t i = 0; i < size; ++i) {
            if (!read(tensors[i], found) || !is_plain(found, dtype) || !is_contiguous(found) ||
                element_count(found) != counts.data()[i])
                return false;
            addresses.data()[i] = static_cast<std::int64_t>(address_of(found));
            if (addresses.data()[i] == 0) return false;
        }
        return true;
    }

  private:
    // False for what DLPack cannot describe: no tensor, a sparse one.
    bool read(nb::handle tensor, DlTensor &found) const {
        if (!tensor.is_none() && exchange_->tensor_from_object(tensor.ptr(), &found) == 0) return true;
        PyErr_Clear();
        return false;
    }

    const DlExchange *exchange_;
};

} // namespace

void bind_arrivals(nb::module_ &module) {
    module.def("mark_gradients", &mark_gradients, "parameters"_a, "name"_a, "mark"_a);

    nb::class_<TensorReader>(module, "TensorReader")
        .def(nb::init<nb::handle>(), "exchange"_a)
        .def("fit", &TensorReader::fit, "tensors"_a, "dtype"_a, "shapes"_a.noconvert())
        .def("find", &TensorReader::find, "tensors"_a, "dtype"_a, "counts"_a.noconvert(), "addresses"_a.noconvert());

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

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridpar.comm.kvstore.arrays import as_tensor, is_array, is_mxnet, library_array, library_of

_DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_numpy_arrays_share_their_memory(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    view = as_tensor(array, write=True)
    view.fill_(3)
    assert tuple(view.shape) == shape and (array == 3).all() and view.numpy().dtype == array.dtype


def test_strided_numpy_arrays_are_viewed() -> None:
    array = np.arange(24.0).reshape(4, 6)
    view = as_tensor(array[::2, 1:].T, write=True)
    assert view.tolist() == array[::2, 1:].T.tolist()
    view[0, 0] = -1
    assert array[0, 1] == -1


def test_a_view_keeps_the_memory_of_its_array() -> None:
    view = as_tensor(np.full(100_000, 7.0))
    del_me = [np.zeros(100_000) for _ in range(5)]
    assert (view == 7).all() and len(del_me) == 5


def test_a_read_only_array_is_copied_for_reading_and_refused_for_writing() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    view = as_tensor(array)
    view[0] = 5
    assert array[0] == 0
    with pytest.raises(TypeError, match=r"read-only numpy.ndarray of shape \[3\]; use .copy"):
        as_tensor(array, write=True)


@pytest.mark.parametrize(
    "array", [np.arange(3.0)[::-1], np.array(["a"]), np.array([None]), np.zeros(3, ">f4"), np.zeros(3, np.longdouble)]
)
def test_numpy_arrays_that_torch_cannot_view_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be viewed as a tensor"):
        as_tensor(array)


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0], None, "text", b"bytes"])
def test_what_is_no_array_is_refused_with_the_way_out(value: object) -> None:
    assert not is_array(value)
    with pytest.raises(TypeError, match=r"expected an array, got .*; pass a torch tensor, a NumPy or CuPy array"):
        as_tensor(value)


def test_torch_tensors_are_themselves_and_need_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    view = as_tensor(parameter, write=True)
    view.fill_(2)
    assert (parameter == 2).all() and not view.requires_grad


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a dense array, got a sparse tensor of shape \[2, 3\]"):
        as_tensor(torch.zeros(2, 3).to_sparse())


class _Foreign:
    """An array of a library that nobody knows, but that speaks DLPack."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __dlpack__(self, **arguments: object) -> object:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()


def test_arrays_that_speak_dlpack_share_their_memory() -> None:
    data = np.arange(6.0).reshape(2, 3)
    foreign = _Foreign(data)
    view = as_tensor(foreign, write=True)
    view[1, 2] = 9
    assert is_array(foreign) and data[1, 2] == 9 and library_of(foreign) == "torch"


class _Broken(_Foreign):
    def __dlpack__(self, **arguments: object) -> object:
        raise BufferError("cannot export")


def test_an_array_that_cannot_export_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="_Broken cannot be viewed as a tensor: cannot export"):
        as_tensor(_Broken(np.zeros(2)))


def test_libraries_get_their_own_arrays_over_the_same_memory() -> None:
    tensor = torch.zeros(3)
    assert library_of(tensor) == "torch" and library_array(tensor, "torch") is tensor
    array = library_array(tensor, "numpy")
    assert library_of(array) == "numpy" and not is_mxnet(array)
    array[1] = 4
    assert tensor.tolist() == [0, 4, 0]

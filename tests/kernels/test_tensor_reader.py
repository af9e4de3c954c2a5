"""What is read of many tensors at once, against each tensor's own attributes; with and without DLPack's API."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar.kernels import _native, tensor_reader
from hybridpar.kernels.tensor_reader import Addresses, Expected
from tests.kernels.tensors import DTYPES

CPU = torch.device("cpu")
ODD: dict[str, Callable[[], Tensor | None]] = {
    "missing": lambda: None,
    "another shape": lambda: torch.ones(3, 2),
    "another number of dimensions": lambda: torch.ones(6),
    "another dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "an integer": lambda: torch.ones(2, 3, dtype=torch.int32),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "another device": lambda: torch.ones(2, 3, device="meta"),
}
STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.ones(3, 2).t(),
    "with gaps": lambda: torch.ones(2, 4)[:, :3],
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
}


@pytest.fixture(params=["compiled", "attributes"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "attributes":
        monkeypatch.setattr(tensor_reader, "_READER", None)
    elif tensor_reader._READER is None:
        pytest.skip("this torch has no exchange API of DLPack")


def _tensors() -> list[Tensor | None]:
    base = torch.ones(100)
    return [torch.ones(2, 3), base[7:13].view(2, 3), nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3)) * 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_as_expected_fit_and_are_found(dtype: torch.dtype) -> None:
    shapes = [(), (5,), (2, 3), (4, 1, 2)]
    tensors: list[Tensor | None] = [torch.ones(shape, dtype=dtype) for shape in shapes]
    assert Expected([torch.Size(shape) for shape in shapes], dtype, CPU).fit(tensors)
    found = Addresses([1, 5, 6, 8], dtype).find(tensors)
    assert found is not None
    assert found.tolist() == [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_that_is_otherwise_does_not_fit(kind: str, place: int) -> None:
    tensors = _tensors()
    expected = Expected([torch.Size((2, 3))] * 5, torch.float32, CPU)
    assert expected.fit([*tensors, torch.ones(2, 3)])
    tensors.insert(place, ODD[kind]())
    assert not expected.fit(tensors)


@pytest.mark.parametrize("kind", STRIDED)
def test_a_strided_one_fits_but_has_no_address(kind: str) -> None:
    tensors = [*_tensors(), STRIDED[kind]()]
    assert Expected([torch.Size((2, 3))] * 5, torch.float32, CPU).fit(tensors)
    assert Addresses([6] * 5, torch.float32).find(tensors) is None


def test_a_missing_or_empty_one_has_no_address() -> None:
    for odd, count in ((None, 6), (torch.ones(0), 0), (torch.ones(2, 3, device="meta"), 6)):
        assert Addresses([6] * 4 + [count], torch.float32).find([*_tensors(), odd]) is None


def test_too_few_tensors_do_not_fit() -> None:
    assert not Expected([torch.Size((2, 3))] * 5, torch.float32, CPU).fit(_tensors())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        _native.TensorReader(object())
    if (reader := tensor_reader._READER) is None:
        return
    numbers, tensors = np.array([6, 6]), [torch.ones(2, 3), torch.ones(2, 3)]
    with pytest.raises(ValueError, match="expected a dtype code below 4, got 7"):
        reader.fit(tensors, 7, numbers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a shape for each of 2 tensors"):
        reader.fit(tensors, _native.FLOAT32, np.array([2, 2, 3]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 2 counts and addresses, got 2 and 1"):
        reader.find(tensors, _native.FLOAT32, numbers, np.empty(1, np.int64))  # type: ignore[arg-type]

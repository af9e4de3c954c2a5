"""Optimizers in the store: what is done with a merged gradient and the stored weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.kvstore.arrays import Library, library_array, mxnet_module, wait_to_read, wait_to_write
from hybridpar.comm.kvstore.reducer import Key
from hybridpar.comm.kvstore.sparse import RowSparse

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Updater(ABC):
    """Changes a stored value in place, as told by a merged gradient."""

    @abstractmethod
    def __call__(self, key: Key, gradient: Tensor | RowSparse, stored: Tensor, library: Library) -> None:
        """``gradient`` may be overwritten and does not outlive the call. ``library``: of the key's first value."""

    def save(self, file: str | Path, dump_optimizer: bool) -> None:
        """Write the state of all keys."""
        raise self._stateless("save")

    def load(self, file: str | Path) -> None:
        """Read what ``save`` wrote."""
        raise self._stateless("load")

    def _stateless(self, operation: str) -> Exception:
        return RuntimeError(
            f"{operation}_optimizer_states: expected an optimizer in the store, got an updater whose state the store "
            "does not know; use set_optimizer"
        )


class FunctionUpdater(Updater):
    """A function of (key, gradient, weight), which get arrays of the library that the key was initialised from."""

    def __init__(self, function: Callable[[Key, Any, Any], object]) -> None:
        self._function = function

    def __call__(self, key: Key, gradient: Tensor | RowSparse, stored: Tensor, library: Library) -> None:
        grad = _rows_for(gradient, library) if isinstance(gradient, RowSparse) else library_array(gradient, library)
        weight = library_array(stored, library)
        self._function(key, grad, weight)
        if library == "mxnet":
            _settle_mxnet(grad, weight)


class MxnetUpdater(Updater):
    """What ``mxnet.optimizer.get_updater`` returns, with states in MXNet's own format."""

    def __init__(self, updater: Any) -> None:
        self._updater = updater

    def __call__(self, key: Key, gradient: Tensor | RowSparse, stored: Tensor, library: Library) -> None:
        grad = _rows_for(gradient, "mxnet") if isinstance(gradient, RowSparse) else library_array(gradient, "mxnet")
        weight = library_array(stored, "mxnet")
        self._updater(key, grad, weight)
        _settle_mxnet(grad, weight)

    def save(self, file: str | Path, dump_optimizer: bool) -> None:
        Path(file).write_bytes(self._updater.get_states(dump_optimizer))

    def load(self, file: str | Path) -> None:
        self._updater.set_states(Path(file).read_bytes())


class TorchUpdater(Updater):
    """A torch optimizer for every key.

    Args:
        factory: makes one from a list with a single parameter, for example
            ``functools.partial(torch.optim.SGD, lr=0.1)``.

    Attributes:
        optimizers: of each key, from its first update on. Change ``param_groups`` to follow a schedule.
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self._parameters: dict[Key, torch.nn.Parameter] = {}
        self._loaded: dict[Key, dict[str, Any]] = {}
        self.optimizers: dict[Key, torch.optim.Optimizer] = {}

    def __call__(self, key: Key, gradient: Tensor | RowSparse, stored: Tensor, library: Library) -> None:
        if key not in self.optimizers:
            self._parameters[key] = torch.nn.Parameter(stored)
            optimizer = self._factory([self._parameters[key]])
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    "set_optimizer: expected a function that makes a torch optimizer from a list of parameters, got "
                    f"one that makes {type(optimizer).__name__}"
                )
            if key in self._loaded:
                optimizer.load_state_dict(self._loaded.pop(key))
            self.optimizers[key] = optimizer
        parameter = self._parameters[key]
        if parameter.data_ptr() != stored.data_ptr():
            parameter.data = stored
        if isinstance(gradient, RowSparse):
            parameter.grad = torch.sparse_coo_tensor(
                gradient.indices[None], gradient.values, gradient.shape, is_coalesced=True, check_invariants=False
            )
        else:
            parameter.grad = gradient
        try:
            self.optimizers[key].step()
        finally:
            parameter.grad = None

    def save(self, file: str | Path, dump_optimizer: bool) -> None:
        states: Mapping[Key, Any] = self._loaded | {key: one.state_dict() for key, one in self.optimizers.items()}
        torch.save({"optimizer_states": states}, file)

    def load(self, file: str | Path) -> None:
        found = torch.load(file, weights_only=True, map_location="cpu")
        if not isinstance(found, dict) or not isinstance(found.get("optimizer_states"), dict):
            raise ValueError(f"{file}: expected what save_optimizer_states wrote for torch optimizers")
        self._loaded = dict(found["optimizer_states"])
        for key in list(self._loaded.keys() & self.optimizers.keys()):
            self.optimizers[key].load_state_dict(self._loaded.pop(key))


def updater_for(optimizer: Any) -> Updater:
    """What ``set_optimizer`` is given, as an updater.

    Args:
        optimizer: an ``mxnet.optimizer.Optimizer``, or a factory of torch optimizers.

    Raises:
        TypeError: neither.
    """
    if _of_mxnet(optimizer, "Optimizer"):
        return MxnetUpdater(mxnet_module("mxnet.optimizer").get_updater(optimizer))
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"set_optimizer: expected a function that makes an optimizer for each key, got a {kind} over parameters of "
            f"its own; use functools.partial(torch.optim.{kind}, lr=...)"
        )
    if not callable(optimizer):
        raise TypeError(
            "set_optimizer: expected an mxnet.optimizer.Optimizer, or a function such as "
            f"functools.partial(torch.optim.SGD, lr=0.1), got {type(optimizer).__name__}"
        )
    return TorchUpdater(optimizer)


def updater_of(function: Any) -> Updater:
    """What ``_set_updater`` is given, as an updater.

    Raises:
        TypeError: it cannot be called.
    """
    if _of_mxnet(function, "Updater"):
        return MxnetUpdater(function)
    if not callable(function):
        raise TypeError(f"_set_updater: expected a function of key, gradient and weight, got {type(function).__name__}")
    return FunctionUpdater(function)


def describe_optimizer(optimizer: Any) -> str:
    """Text that is the same on ranks that asked for the same: what makes it, and its settings that are plain values."""
    function = getattr(optimizer, "func", optimizer)
    named = function if hasattr(function, "__qualname__") else type(function)
    settings = vars(optimizer) if _of_mxnet(optimizer, "Optimizer") else getattr(optimizer, "keywords", {})
    plain = (f"{name}={value}" for name, value in settings.items() if isinstance(value, bool | int | float | str))
    return f"{named.__module__}.{named.__qualname__}({', '.join(plain)})"


def _of_mxnet(value: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("mxnet.optimizer") for kind in type(value).__mro__)


def _rows_for(rows: RowSparse, library: Library) -> Any:
    if library != "mxnet":
        return rows
    nd = mxnet_module("mxnet.ndarray")
    data, indices = library_array(rows.values, "mxnet"), library_array(rows.indices, "mxnet")
    return nd.sparse.row_sparse_array((data, indices), shape=rows.shape)


def _settle_mxnet(*arrays: Any) -> None:
    """Its engine may still read and write the memory, which is ours again after this."""
    for array in arrays:
        wait_to_read(array)
        wait_to_write(array)

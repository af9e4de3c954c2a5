"""Start from the same state: parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod import asked
from hybridpar.comm.horovod.handles import Call, Calls
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set
from hybridpar.comm.horovod.request import Operation, Request


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or a list of tensors.

    Raises:
        ValueError: something else is among them; root_rank is not in the process set; not initialised.
        CommunicationError: names, shapes or dtypes differ between the ranks, or a rank was lost or late.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"broadcast_parameters: expected a dict or a list of tensors, got {type(params).__name__}")
    else:
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    exchange = process_set.exchange
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"broadcast_parameters: expected tensors, got {type(tensor).__name__} for {name}; "
                "use hvd.broadcast_object for it"
            )
    # Names are taken apart from those of other broadcasts: a script may use them for something else meanwhile.
    calls = [
        asked.broadcast(tensor, root_rank, exchange.named("broadcast_parameters", name), process_set, in_place=True)
        for name, tensor in pairs
    ]
    Calls(calls).result()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank``, on all ranks. It is pickled there and unpickled elsewhere, as Horovod does.

    Args:
        obj: anything that pickle takes; not looked at on the other ranks.
        name: as for other calls.

    Raises:
        CommunicationError: it cannot be pickled (on every rank), or a rank was lost or late.
        ValueError: root_rank is not in the process set; not initialised.
    """
    root = process_set.place_of(root_rank) if process_set.exchange else 0
    is_root = root == process_set.exchange.rank
    data = _gathered("broadcast_object", obj if is_root else None, name, process_set, sends=is_root)[root]
    return obj if is_root else pickle.loads(data)  # noqa: S301  (from a rank of this job)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order. They are pickled and unpickled, as Horovod does.

    Raises:
        CommunicationError: one cannot be pickled (on every rank), or a rank was lost or late.
        ValueError: not initialised.
    """
    everyone = _gathered("allgather_object", obj, name, process_set, sends=True)
    return [pickle.loads(data) for data in everyone]  # noqa: S301  (from ranks of this job)


def _gathered(kind: str, obj: Any, name: str | None, process_set: ProcessSet, *, sends: bool) -> list[bytes]:
    """What each rank has pickled; nothing of those that do not send."""
    exchange = process_set.exchange
    data, problem = b"", ""
    if sends:
        try:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle raises what the object's own methods raise
            problem = f"{type(obj).__name__} cannot be pickled: {type(error).__name__}: {error}"
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    request = Request("allgather", "uint8")
    operation = Operation(exchange.named(kind, name), request, tensor, own=[len(tensor)], problem=problem)
    gathered, rows = Call(exchange, exchange.ask(operation)).result()
    return [part.numpy().tobytes() for part in gathered.split(rows)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank's optimizer the options and the state of that of ``root_rank``.

    Ranks need not have any state yet, nor need the root: then no rank has any afterwards. All kinds of optimizers.

    Raises:
        CommunicationError: the state cannot be pickled, or a rank was lost or late.
        ValueError: the ranks' optimizers have other numbers of parameters (on every rank); root_rank is not in the
            process set; not initialised.
    """
    root = process_set.place_of(root_rank) if process_set.exchange else 0
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    everyone = allgather_object(sizes, None, process_set)
    for place, theirs in enumerate(everyone):
        if theirs != everyone[root]:
            raise ValueError(
                f"broadcast_optimizer_state: expected parameter groups of {everyone[root]} parameters as on rank "
                f"{root_rank}, got {theirs} on rank {(process_set.ranks or [])[place]}; build the same optimizer on all"
            )
    if root == process_set.exchange.rank:
        tensors: list[Tensor] = []
        broadcast_object(_taken_apart(optimizer.state_dict(), tensors), root_rank, None, process_set)
        broadcast_parameters(tensors, root_rank, process_set)
        return
    skeleton = broadcast_object(None, root_rank, None, process_set)
    tensors = []
    state_dict = _put_together(skeleton, tensors)
    broadcast_parameters(tensors, root_rank, process_set)
    _adopt(optimizer, state_dict)


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in a structure whose tensors travel by themselves."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The structure, with places for tensors, which are put into the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _taken_apart(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(one, tensors) for one in value)
    return value


def _put_together(value: Any, tensors: list[Tensor]) -> Any:
    """The inverse, with new tensors that are still to be filled."""
    if isinstance(value, _Place):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _put_together(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(one, tensors) for one in value)
    return value


def _adopt(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """In place: others, schedulers among them, hold the groups and the state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group, options in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    optimizer.state.clear()
    for key, state in state_dict["state"].items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = state

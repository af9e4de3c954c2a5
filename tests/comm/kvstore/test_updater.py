from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import kvstore
from hybridpar.comm.group import Group
from hybridpar.comm.kvstore.updater import describe_optimizer, updater_for, updater_of
from hybridpar.kvstore import KVStore, RowSparse
from tests.ranks import run_threads

_FACTORIES = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.3),
}
_START = {"a": torch.linspace(-1, 1, 6).view(2, 3), "b": torch.linspace(2, 3, 4)}


def gradient(rank: int, key: str, step: int) -> torch.Tensor:
    seed = 100 * step + 10 * rank + ord(key)
    return torch.randn(_START[key].shape, generator=torch.Generator().manual_seed(seed))


def plain(factory: Any, ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """One process that sees the gradients of all ranks."""
    parameters = {key: torch.nn.Parameter(value.clone()) for key, value in _START.items()}
    optimizer = factory(list(parameters.values()))
    for step in range(steps):
        for key, parameter in parameters.items():
            parameter.grad = sum(gradient(rank, key, step) for rank in range(ranks))  # type: ignore[assignment]
        optimizer.step()
    return {key: parameter.detach() for key, parameter in parameters.items()}


def pulled(kv: KVStore) -> dict[str, torch.Tensor]:
    outs = {key: torch.zeros_like(value) for key, value in _START.items()}
    kv.pull(list(outs), list(outs.values()))
    return outs


@pytest.mark.parametrize("name", _FACTORIES)
def test_torch_optimizers_in_the_store_step_as_outside_of_it(name: str) -> None:
    def work(group: Group) -> Any:
        kv = kvstore.create("dist_sync", group)
        kv.init(list(_START), [value * (1 + group.rank) for value in _START.values()])
        kv.set_optimizer(_FACTORIES[name])
        for step in range(5):
            for key in list(_START)[:: 1 if group.rank else -1]:
                kv.push(key, gradient(group.rank, key, step))
        found = pulled(kv)
        kv.close()
        return found

    expected = plain(_FACTORIES[name], 2, 5)
    for found in run_threads(2, work):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("name", _FACTORIES)
def test_saved_states_go_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    kv = kvstore.create("local")
    kv.init(list(_START), list(_START.values()))
    kv.set_optimizer(_FACTORIES[name])
    for step in range(5):
        if step == 3:
            kv.save_optimizer_states(tmp_path / "states")
            middle = pulled(kv)
            kv.close()
            kv = kvstore.create("local")
            kv.init(list(_START), list(middle.values()))
            kv.set_optimizer(_FACTORIES[name])
            kv.load_optimizer_states(tmp_path / "states")
            # Saving again before any update loses nothing, and loading into optimizers that exist replaces them.
            kv.save_optimizer_states(tmp_path / "again")
        for key in _START:
            kv.push(key, gradient(0, key, step))
        if step == 3:
            pulled(kv)
            state = {key: one.state_dict() for key, one in kv.optimizers.items()}
            kv.load_optimizer_states(tmp_path / "again")
            assert str(state) != str({key: one.state_dict() for key, one in kv.optimizers.items()})
            for key, one in kv.optimizers.items():
                one.load_state_dict(state[key])
    for key, value in plain(_FACTORIES[name], 1, 5).items():
        torch.testing.assert_close(pulled(kv)[key], value)
    kv.close()


def test_saving_waits_for_what_has_been_pushed(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    kv.init("w", torch.zeros(2))
    kv.set_optimizer(_FACTORIES["momentum"])
    kv.push("w", torch.ones(2))
    kv.save_optimizer_states(tmp_path / "states")
    saved = torch.load(tmp_path / "states", weights_only=True)["optimizer_states"]
    assert saved["w"]["state"][0]["momentum_buffer"].tolist() == [1, 1]
    kv.close()


def test_a_schedule_changes_the_rate_of_every_key() -> None:
    kv = kvstore.create("local")
    assert kv.optimizers == {}
    kv.init("w", torch.zeros(1))
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    out = torch.zeros(1)
    kv.pushpull("w", torch.ones(1), out)
    for optimizer in kv.optimizers.values():
        optimizer.param_groups[0]["lr"] = 0.25
    kv.pushpull("w", torch.ones(1), out)
    assert out.tolist() == [-1.25]
    kv.close()


def test_torch_optimizers_step_on_rows() -> None:
    kv = kvstore.create("local")
    table = torch.arange(8.0).view(4, 2)
    kv.init("table", RowSparse(torch.arange(4), table, (4, 2)))
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=0.5))
    kv.push("table", RowSparse(torch.tensor([2, 0, 2]), torch.ones(3, 2), (4, 2)))
    out = torch.zeros(4, 2)
    kv.pull("table", out)
    assert out.tolist() == [[-0.5, 0.5], [2, 3], [3, 4], [6, 7]]
    kv.close()


def test_an_optimizer_set_after_pushes_begins_with_what_they_left() -> None:
    kv = kvstore.create("local")
    kv.init("w", torch.zeros(1))
    kv.push("w", torch.full((1,), 7.0))
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    out = torch.zeros(1)
    kv.pushpull("w", torch.ones(1), out)
    assert out.tolist() == [6]
    kv.close()


@pytest.mark.parametrize("operation", ["save_optimizer_states", "load_optimizer_states"])
def test_states_need_an_optimizer(operation: str, tmp_path: Path) -> None:
    kv = kvstore.create("local")
    with pytest.raises(RuntimeError, match=f"{operation}: expected an optimizer in the store, got none"):
        getattr(kv, operation)(tmp_path / "states")
    kv._set_updater(lambda key, merged, stored: None)
    with pytest.raises(RuntimeError, match=f"{operation}: expected an optimizer in the store, got an updater"):
        getattr(kv, operation)(tmp_path / "states")
    kv.close()


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    updater = updater_for(torch.optim.SGD)
    torch.save({"else": 1}, tmp_path / "else")
    with pytest.raises(ValueError, match="expected what save_optimizer_states wrote"):
        updater.load(tmp_path / "else")
    torch.save({"optimizer_states": Path("code")}, tmp_path / "code")
    with pytest.raises(Exception, match="Weights only load failed"):
        updater.load(tmp_path / "code")


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            torch.optim.SGD([torch.zeros(1)], lr=1),
            r"got a SGD over parameters of its own; use functools.partial\(torch",
        ),
        (3, "expected an mxnet.optimizer.Optimizer, or a function such as .*, got int"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        updater_for(optimizer)


def test_a_factory_of_something_else_is_refused_at_the_first_update() -> None:
    kv = kvstore.create("local")
    kv.init("w", np.zeros(1))
    kv.set_optimizer(lambda parameters: "nothing")
    kv.push("w", np.zeros(1))
    with pytest.raises(TypeError, match=r"expected a function that makes a torch optimizer .* one that makes str"):
        kv.pull("w", np.zeros(1))
    kv.close()


def test_what_cannot_be_called_is_no_updater() -> None:
    with pytest.raises(TypeError, match="expected a function of key, gradient and weight, got int"):
        updater_of(3)


def test_optimizers_are_told_apart_by_what_makes_them_and_their_plain_settings() -> None:
    one, other = _FACTORIES["momentum"], functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01)
    assert describe_optimizer(one) == "torch.optim.sgd.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)"
    assert describe_optimizer(one) != describe_optimizer(other)
    assert describe_optimizer(torch.optim.SGD) == "torch.optim.sgd.SGD()"
    assert describe_optimizer(lambda parameters: None).endswith("<lambda>()")

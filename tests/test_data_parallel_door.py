"""What DataParallel gives, refuses, keeps and lets go: everything but the sums themselves."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.lanes.lane import Lane
from tests.head.cases import errors_of
from tests.ranks import run_threads
from tests.waits import Waits


def _model(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def test_all_ranks_start_with_what_rank_0_holds() -> None:
    models = [_model().requires_grad_(rank >= 0) for rank in range(3)]
    for rank, model in enumerate(models):
        model[0].bias.requires_grad_(False)
        model[1].running_mean.fill_(rank + 0.5)
        model[1].num_batches_tracked.fill_(rank + 5)
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}
    run_threads(3, lambda group: hp.DataParallel(models[group.rank], group=group) and None)
    for model in models:
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_buffers_are_those_of_rank_0_in_training_alone() -> None:
    def work(group: Any) -> list[float]:
        model = _model()
        parallel = hp.DataParallel(model, group=group)
        mean, seen = model[1].running_mean, []

        def differ() -> None:
            mean.data.fill_(float(group.rank))  # unseen by autograd

        x = torch.zeros(2, 3)
        differ()
        parallel.eval()(x)
        seen.append(mean[0].item())
        parallel.train()
        with torch.no_grad():
            parallel.module[1].momentum = 0.0  # the forward pass itself changes nothing
            parallel(x)
        seen.append(mean[0].item())
        with parallel.no_sync():
            parallel(x).sum().backward()
        seen.append(mean[0].item())
        loss = parallel(x).sum()
        seen.append(mean[0].item())
        differ()
        loss = loss + parallel(x).sum()
        seen.append(mean[0].item())
        loss.backward()
        parallel(x)
        seen.append(mean[0].item())
        differ()
        parallel.broadcast_buffers()
        seen.append(mean[0].item())
        return seen

    assert run_threads(2, work)[1] == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_buffers_stay_apart_where_that_is_asked_for() -> None:
    def work(group: Any) -> float:
        model = _model()
        parallel = hp.DataParallel(model, group=group, broadcast_buffers=False)
        model[1].momentum = 0.0
        model[1].running_mean.fill_(float(group.rank))
        parallel(torch.zeros(2, 3)).sum().backward()
        return float(model[1].running_mean[0])

    assert run_threads(2, work) == [0.0, 1.0]


def test_state_dict_is_that_of_the_module() -> None:
    def work(group: Any) -> None:
        model, other = _model(), _model()
        parallel = hp.DataParallel(model, group=group)
        assert list(parallel.state_dict()) == list(model.state_dict())
        assert parallel.state_dict()._metadata.keys() == model.state_dict()._metadata.keys()  # type: ignore[attr-defined]
        parallel.load_state_dict(other.state_dict())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
        other.load_state_dict(parallel.state_dict())
        with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
            parallel.load_state_dict({name: v for name, v in other.state_dict().items() if name != "0.bias"})
        missing, unexpected = parallel.load_state_dict({"new": torch.ones(1)}, strict=False)
        assert "0.bias" in missing and unexpected == ["new"]
        with pytest.raises(ValueError, match="assign=False"):
            parallel.load_state_dict(other.state_dict(), assign=True)

    run_threads(2, work)


def test_state_of_a_larger_module_has_no_trace_of_the_wrapper() -> None:
    def work(group: Any) -> None:
        plain = nn.ModuleDict({"backbone": _model(), "extra": nn.Linear(2, 2)})
        wrapped = nn.ModuleDict({"backbone": hp.DataParallel(_model(), group=group), "extra": nn.Linear(2, 2)})
        assert list(wrapped.state_dict()) == list(plain.state_dict())
        wrapped.load_state_dict(plain.state_dict())
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in wrapped.state_dict().items())
        plain.load_state_dict(wrapped.state_dict())

    run_threads(2, work)


def test_a_sharded_head_inside_the_module_is_left_alone() -> None:
    """Its rows differ between ranks, in number too, and its gradients are complete as they are."""

    class Recognizer(nn.Module):
        def __init__(self, group: Any) -> None:
            super().__init__()
            self.body = nn.Linear(3, 4).double()
            self.head = hp.ShardedClassifier(4, 7, group=group, dtype=torch.float64, initial_std=1.0)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)), labels)  # type: ignore[no-any-return]

    draw = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, dtype=torch.float64, generator=draw)
    labels = torch.randint(7, (6,), generator=draw)
    body = nn.Linear(3, 4).double()

    def work(group: Any) -> Any:
        module = Recognizer(group)
        module.body.load_state_dict(body.state_dict())
        rows = module.head.weight.detach().clone()
        parallel = hp.DataParallel(module, group=group)
        assert torch.equal(module.head.weight, rows)
        size = 6 // group.size
        mine = slice(group.rank * size, (group.rank + 1) * size)
        parallel(images[mine], labels[mine]).backward()
        return module.body.weight.grad, module.head.weight.grad

    (body_grad, rows_grad), *_ = run_threads(1, work)
    several = run_threads(3, work)
    for found, _ in several:
        torch.testing.assert_close(found, body_grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rows for _, rows in several]), rows_grad, rtol=1e-12, atol=1e-12)


def _with(change: Callable[[nn.Sequential], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = _model()
        change(model)
        return model

    return make


OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wider": (lambda: _model(5), r"0\.weight: float32\[4, 3\] on rank 0; 0\.weight: float32\[5, 3\] on rank 1"),
    "deeper": (_with(lambda m: m.append(nn.Linear(2, 2))), r"on rank 0; 3\.weight: float32\[2, 2\] on rank 1"),
    "dtype": (lambda: _model().double(), r"0\.weight: float32\[4, 3\] on rank 0; 0\.weight: float64\[4, 3\] on rank 1"),
    "frozen": (
        _with(lambda m: m[0].bias.requires_grad_(False)),
        r"0\.bias: float32\[4\] on rank 0; 0\.bias \(frozen\): float32\[4\] on rank 1",
    ),
    "all-frozen": (lambda: _model().requires_grad_(False), r"0\.weight \(frozen\): float32\[4, 3\] on rank 1"),
    "buffer": (_with(lambda m: m.register_buffer("table", torch.ones(2))), r"table: float32\[2\] on rank 1"),
    "nothing": (nn.Identity, r"0\.weight: float32\[4, 3\] on rank 0; nothing on rank 1"),
}


@pytest.mark.parametrize("what", OTHER_MODELS)
def test_different_models_are_named_on_every_rank(what: str) -> None:
    make, message = OTHER_MODELS[what]

    def work(group: Any) -> None:
        hp.DataParallel(make() if group.rank == 1 else _model(), group=group)

    for error in errors_of(2, work):
        assert isinstance(error, hp.CommunicationError)
        with pytest.raises(hp.CommunicationError, match=message):
            raise error


def test_wrong_or_different_settings_are_refused_on_every_rank() -> None:
    def wrong(group: Any) -> None:
        hp.DataParallel(_model(), group=group, reduction="average" if group.rank else "sum")  # type: ignore[arg-type]

    def different(group: Any, name: str, values: tuple[Any, Any]) -> None:
        hp.DataParallel(_model(), group=group, **{name: values[group.rank]})

    def frozen(group: Any) -> None:
        hp.DataParallel(_model().requires_grad_(False), group=group)

    for error in errors_of(2, wrong):
        assert type(error) is ValueError and "expected 'sum' or 'mean', got 'average'" in str(error)
    for name, values in (
        ("reduction", ("sum", "mean")),
        ("bucket_bytes", (8, 9)),
        ("broadcast_buffers", (True, False)),
    ):
        for error in errors_of(2, different, name, values):
            assert type(error) is ValueError and f"same {name} on every rank" in str(error)
    for error in errors_of(2, frozen):
        assert type(error) is ValueError and "expected parameters that require a gradient" in str(error)


def test_sparse_gradients_are_refused_on_every_rank() -> None:
    def work(group: Any) -> None:
        parallel = hp.DataParallel(nn.Embedding(5, 2, sparse=True), group=group)
        parallel(torch.tensor([1, 2])).sum().backward()

    for error in errors_of(2, work):
        assert type(error) is TypeError and "expected dense gradients" in str(error)


def test_after_a_failed_backward_the_ranks_are_out_of_step_and_say_so() -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 2)
        parallel = hp.DataParallel(model, group=group)

        def fail(_: Tensor) -> None:
            raise ArithmeticError("hook")

        handle = model.weight.register_hook(fail)
        with pytest.raises(ArithmeticError, match="hook"):
            parallel(torch.ones(1, 2)).sum().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="out of step"):
            parallel(torch.ones(1, 2))

    run_threads(2, work)


def test_a_change_of_dtype_after_wrapping_is_refused() -> None:
    """It would travel in the old one."""

    def work(group: Any) -> None:
        parallel = hp.DataParallel(nn.Linear(2, 2), group=group).double()
        parallel(torch.ones(1, 2, dtype=torch.float64)).sum().backward()

    for error in errors_of(2, work):
        assert type(error) is ValueError and "as registered, got float64" in str(error)


def test_a_parameter_that_is_thawed_after_wrapping_is_refused() -> None:
    """Its gradient would not be summed."""

    def work(group: Any) -> None:
        model = _model()
        model[2].bias.requires_grad_(False)
        parallel = hp.DataParallel(model, group=group)
        parallel(torch.ones(2, 3)).sum().backward()
        model[2].bias.requires_grad_(True)
        parallel.eval()(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match=r"2\.bias required no gradient when it was wrapped"):
            parallel.train()(torch.ones(2, 3))
        parallel.close()
        hp.DataParallel(model, group=group)(torch.ones(2, 3)).sum().backward()
        assert model[2].bias.grad.tolist() == [2.0 * group.size] * 2

    run_threads(2, work)


def test_wrapping_twice_is_refused_because_it_would_sum_twice() -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        parallel = hp.DataParallel(model, group=group)
        with pytest.raises(ValueError, match="in no DataParallel yet"):
            hp.DataParallel(model, group=group)
        with pytest.raises(ValueError, match="in no DataParallel yet"):
            hp.DataParallel(nn.Sequential(parallel), group=group)
        parallel.close()
        with pytest.raises(RuntimeError, match="was closed"):
            parallel(torch.ones(1, 2))
        assert parallel.eval()(torch.ones(1, 2)).shape == (1, 1)
        if group.rank == 0:  # closed: plain backward, of no concern to other ranks
            model(torch.ones(1, 2)).sum().backward()
            assert model.bias.grad.item() == 1
            model.zero_grad()
        hp.DataParallel(model, group=group)(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad.item() == 2

    run_threads(2, work)


def test_sums_go_on_where_only_the_module_is_kept() -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        hp.DataParallel(model, group=group)
        gc.collect()
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad.item() == group.size

    run_threads(2, work)


def test_the_thread_ends_when_module_and_wrapper_are_dropped() -> None:
    def count() -> int:
        return sum(thread.name == "hybridpar-engine" for thread in threading.enumerate())

    def work(group: Any) -> None:
        hp.DataParallel(_model(), group=group)(torch.ones(2, 3)).sum().backward()

    gc.collect()
    before = count()
    run_threads(2, work)
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert count() <= before


def test_a_bucket_travels_while_backward_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of the first layer waits until the sum of the last layer's gradients is there."""

    def work(group: Any) -> int:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        parallel = hp.DataParallel(model, group=group, bucket_bytes=16)
        (track,) = {current.track for current in parallel._engine._rounds}
        arrived, lane, count = threading.Event(), track.lane, 0

        class Watched:
            def all_reduce(self, tensor: Tensor, op: Any) -> None:
                nonlocal count
                lane.all_reduce(tensor, op)
                count += 1
                arrived.set()

        watched: Lane = Watched()  # type: ignore[assignment]
        monkeypatch.setattr(track, "lane", watched)
        x = torch.ones(1, 2)
        model[1](Waits.apply(model[0](x), arrived)).sum().backward()
        assert arrived.is_set()
        return count

    assert run_threads(2, work) == [4, 4]

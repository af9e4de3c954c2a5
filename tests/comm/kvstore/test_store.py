"""What the store promises, each by name: the semantics of MXNet's KVStore, on threads as ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import kvstore
from hybridpar.comm.group import Group
from hybridpar.kvstore import KVStore, Op, RowSparse
from tests.ranks import run_processes, run_threads

_DOCS = Path(__file__).parents[3] / "docs" / "kvstore.md"


def on(size: int, work: Callable[[KVStore], Any], name: str = "dist_sync", **options: Any) -> list[Any]:
    """``work(store)`` on every rank."""

    def run(group: Group) -> Any:
        store = kvstore.create(name, group, **options)
        try:
            return work(store)
        finally:
            store.close()

    return run_threads(size, run, timeout=20.0)


def pulled(store: KVStore, key: Any, *shape: int) -> Any:
    out = np.full(shape, np.nan, np.float32)
    store.pull(key, out=out)
    return out.tolist()


def full(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)


def test_the_store_tells_its_rank_its_workers_and_its_type() -> None:
    found = on(3, lambda kv: (kv.rank, kv.local_rank, kv.num_workers, kv.type), "Dist_Sync_Perseus")
    assert found == [(rank, rank, 3, "dist_sync_perseus") for rank in range(3)]


def test_local_stores_are_alone_even_in_a_group() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(1, 2))
        kv.push("w", full(kv.rank + 5, 2))
        return kv.rank, kv.num_workers, pulled(kv, "w", 2)

    assert on(2, work, "local") == [(0, 1, [5, 5])] * 2


def test_the_init_value_of_rank_0_wins() -> None:
    def work(kv: KVStore) -> Any:
        mine = full(kv.rank + 1, 2)
        kv.init("w", mine)
        return pulled(kv, "w", 2), mine.tolist()

    assert on(2, work) == [([1, 1], [1, 1]), ([1, 1], [2, 2])]


def test_init_does_not_copy_the_weights_of_rank_0_back_but_broadcast_fills_out() -> None:
    """Trap: Module with update_on_kvstore=False calls init only, Trainer calls broadcast."""

    def work(kv: KVStore) -> Any:
        mine, out = full(kv.rank + 1, 2), [full(0, 2), full(0, 2)]
        kv.broadcast("w", mine, out)
        return mine.tolist(), [one.tolist() for one in out]

    assert on(2, work) == [([rank + 1] * 2, [[1, 1], [1, 1]]) for rank in range(2)]


def test_the_array_of_init_may_be_reused() -> None:
    def work(kv: KVStore) -> Any:
        mine = full(3, 2)
        kv.init("w", mine)
        mine[:] = 9
        return pulled(kv, "w", 2)

    assert on(1, work) == [[3, 3]]


def test_without_an_updater_the_sum_over_workers_replaces_the_value() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(100, 2))
        found = []
        for step in range(3):
            kv.push("w", full(kv.rank + step, 2))
            found.append(pulled(kv, "w", 2)[0])
        return found

    assert on(3, work) == [[3, 6, 9]] * 3


def test_pushes_without_a_pull_between_them_replace_one_another_in_order() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(0, 2))
        for step in range(5):
            kv.push("w", full(step, 2))
        return pulled(kv, "w", 2)

    assert on(2, work) == [[8, 8]] * 2


def test_push_copies_so_that_the_array_may_be_reused_at_once() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(0, 50_000))
        mine = full(1, 50_000)
        kv.push("w", mine)
        mine[:] = 1000
        return pulled(kv, "w", 50_000)

    assert all(found == [2.0] * 50_000 for found in on(2, work))


def test_repeated_keys_and_nested_lists_sum_over_devices() -> None:
    def work(kv: KVStore) -> Any:
        kv.init([5, 7], [full(0, 2), full(0, 2)])
        kv.push([5, 7, 5], [full(1, 2), full(10, 2), full(2, 2)])
        first = pulled(kv, 5, 2)[0], pulled(kv, 7, 2)[0]
        kv.push([5, 7], [[full(1, 2), full(2, 2), full(4, 2)], [full(10, 2), full(20, 2)]])
        return first, (pulled(kv, 5, 2)[0], pulled(kv, 7, 2)[0])

    assert on(2, work) == [((6, 20), (14, 60))] * 2


def test_pull_fills_every_device_and_lists_of_keys() -> None:
    def work(kv: KVStore) -> Any:
        kv.init(["a", "b"], [full(1, 2), full(2, 3)])
        outs = [[full(0, 2), torch.zeros(2)], np.zeros(3, np.float64)]
        kv.pull(["a", "b"], out=outs)
        return [one.tolist() for one in (*outs[0], outs[1])]

    assert on(1, work) == [[[1, 1], [1, 1], [2, 2, 2]]]


def test_pushpull_writes_into_value_where_there_is_no_out() -> None:
    def work(kv: KVStore) -> Any:
        kv.init(["a", "b"], [full(0, 2), full(0, 2)])
        values, outs = [full(1, 2), full(2, 2)], [full(0, 2), full(0, 2)]
        kv.pushpull(["a", "b"], values, out=outs)
        kept = [one.tolist() for one in values]
        kv.pushpull(["a", "b"], values)
        return kept, [one[0] for one in outs], [one[0] for one in values]

    assert on(2, work) == [([[1, 1], [2, 2]], [2, 4], [2, 4])] * 2


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 24.0), (Op.Max, 9.0), ("Min", 1.0), (kvstore.PerseusOp.Mean, 6.0)]
)
def test_operations_combine_over_devices_and_workers(op: Any, expected: float) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(0, 2))
        kv.push("w", [full(value, 2) for value in ((1, 8), (6, 9))[kv.rank]], op=op)
        return pulled(kv, "w", 2)[0]

    assert on(2, work) == [expected] * 2


def test_with_an_updater_push_gives_it_key_merged_and_stored() -> None:
    def work(kv: KVStore) -> Any:
        calls = []

        def update(key: int, merged: np.ndarray, stored: np.ndarray) -> None:
            calls.append((key, merged.tolist(), stored.tolist(), type(stored)))
            stored += 2 * merged

        kv.init(3, full(1, 2))
        kv._set_updater(update)
        kv.push(3, [full(1, 2), full(2, 2)])
        return pulled(kv, 3, 2), calls

    assert on(2, work) == [([13, 13], [(3, [6, 6], [1, 1], np.ndarray)])] * 2


def test_an_updater_gets_arrays_of_the_library_that_the_key_came_from() -> None:
    def work(kv: KVStore) -> Any:
        seen = {}
        kv.init(["numpy", "torch"], [full(0, 2), torch.zeros(2)])
        kv._set_updater(lambda key, merged, stored: seen.update({key: (type(merged), type(stored))}))
        kv.push(["numpy", "torch"], [torch.ones(2), full(1, 2)])
        kv.pull(["numpy", "torch"], [torch.ones(2), full(1, 2)])
        return seen

    assert on(1, work) == [{"numpy": (np.ndarray, np.ndarray), "torch": (torch.Tensor, torch.Tensor)}]


def test_pushes_before_an_updater_is_set_replace_and_those_after_it_update() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(0, 1))
        kv.push("w", full(5, 1))
        kv._set_updater(_add)
        kv.push("w", full(1, 1))
        kv.push("w", full(1, 1))
        return pulled(kv, "w", 1)

    assert on(2, work) == [[14]] * 2


def _add(key: Any, merged: Any, stored: Any) -> None:
    stored += merged


def test_param_only_keys_have_no_optimizer_and_no_compression() -> None:
    """As scripts for Perseus use it: an all-reduce by way of the store."""

    def work(kv: KVStore) -> Any:
        kv.init("metric", full(0, 2), param_only=1)
        kv.init("w", full(0, 2))
        kv._set_updater(_add)
        kv.set_gradient_compression({"type": "2bit", "threshold": 8.0})
        kv.push(["metric", "w"], [full(1.5 + kv.rank, 2), full(5, 2)])
        kv.push("metric", full(kv.rank, 2), op=kvstore.PerseusOp.Max)
        return pulled(kv, "metric", 2)[0], pulled(kv, "w", 2)[0]

    assert on(2, work) == [(1, 0)] * 2


def test_keys_are_int_in_one_store_and_str_in_another() -> None:
    def work(group: Group) -> Any:
        first, second = kvstore.create("dist_sync", group), kvstore.create("dist_sync", group)
        first.init(3, full(1, 2)), second.init("3", full(2, 2))
        first.push(3, full(10, 2)), second.push("3", full(20, 2))
        found = pulled(first, 3, 2)[0], pulled(second, "3", 2)[0]
        first.close(), second.close()
        return found

    assert run_threads(2, work) == [(20, 40)] * 2


def test_stores_side_by_side_have_key_namespaces_updaters_and_compressions_of_their_own() -> None:
    def work(group: Group) -> Any:
        stores = [kvstore.create("dist_sync", group) for _ in range(3)]
        for store in stores:
            store.init("w", full(1, 2))
        stores[1]._set_updater(_add)
        stores[2].set_gradient_compression({"type": "2bit", "threshold": 4.0})
        for store in stores[:: 1 if group.rank else -1]:
            store.push("w", full(5, 2))
        found = [pulled(store, "w", 2)[0] for store in stores]
        for store in stores:
            store.close()
        return found

    assert run_threads(2, work) == [[10, 11, 8]] * 2


def test_workers_may_push_their_keys_in_different_orders_with_any_priorities() -> None:
    def work(kv: KVStore) -> Any:
        keys = list(range(30))
        kv.init(keys, [full(0, 3) for _ in keys])
        for key in keys[:: 1 if kv.rank else -1]:
            kv.push(key, full(key, 3), priority=-key * kv.rank)
        return [pulled(kv, key, 3)[0] for key in keys]

    assert on(2, work) == [[2.0 * key for key in range(30)]] * 2


def test_is_capable_of_an_optimizer_and_of_nothing_else_it_knows() -> None:
    kv = kvstore.create("local")
    assert kv.is_capable("optimizer") and kv.is_capable("Optimizer") and KVStore.is_capable("optimizer")
    with pytest.raises(ValueError, match="expected 'optimizer', got 'sparse'"):
        kv.is_capable("sparse")
    kv.close()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.int64, np.int8, np.uint8])
def test_dtypes_are_summed_as_they_are(dtype: type) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", np.zeros(3, dtype))
        kv.push("w", np.full(3, 7, dtype))
        out = np.zeros(3, dtype)
        kv.pull("w", out)
        return out.tolist()

    assert on(2, work) == [[14] * 3] * 2


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
def test_shapes_of_any_kind(shape: tuple[int, ...]) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", torch.zeros(shape))
        kv.push("w", torch.ones(shape))
        out = torch.zeros(shape)
        kv.pull("w", out)
        return bool((out == 2).all()) and out.shape == shape

    assert on(2, work) == [True, True]


def test_strided_values_and_outs() -> None:
    def work(kv: KVStore) -> Any:
        table = np.arange(24, dtype=np.float32).reshape(4, 6)
        kv.init("w", table[::2, 1:].T)
        kv.push("w", table[::2, 1:].T)
        out = np.zeros((4, 6), np.float32)
        kv.pull("w", out[::2, 1:].T)
        return out.tolist()

    expected = np.zeros((4, 6))
    expected[::2, 1:] = 2 * np.arange(24).reshape(4, 6)[::2, 1:]
    assert on(2, work) == [expected.tolist()] * 2


def test_pull_into_a_parameter_that_needs_a_gradient() -> None:
    def work(kv: KVStore) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(2))
        kv.init("w", parameter)
        kv.push("w", torch.ones(2, requires_grad=True))
        kv.pull("w", parameter)
        return parameter.tolist(), parameter.requires_grad

    assert on(2, work) == [([2, 2], True)] * 2


def test_floating_point_values_are_converted_into_out() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", full(1.5, 2))
        out = np.zeros(2, np.float16)
        kv.pull("w", out)
        return out.tolist()

    assert on(1, work) == [[1.5, 1.5]]


def _rows(indices: list[int], value: float, rows: int = 6) -> RowSparse:
    return RowSparse(np.array(indices, np.int64), full(value, len(indices), 2), (rows, 2))


def test_rows_are_summed_over_devices_and_workers_and_replace_the_table() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("table", RowSparse(np.arange(6), full(9, 6, 2), (6, 2)))
        kv.push("table", [_rows([1, 3], 1), _rows([3], 10 + kv.rank)])
        out = _rows([], 0)
        kv.row_sparse_pull("table", out=out, row_ids=np.array([3, 0, 3]))
        return out.indices.tolist(), out.values.tolist(), pulled(kv, "table", 6, 2)

    table = [[0, 0], [2, 2], [0, 0], [23, 23], [0, 0], [0, 0]]
    assert on(2, work) == [([0, 3], [[0, 0], [23, 23]], table)] * 2


def test_an_updater_sees_rows() -> None:
    def work(kv: KVStore) -> Any:
        seen = []

        def update(key: Any, merged: RowSparse, stored: torch.Tensor) -> None:
            seen.append((key, merged.indices.tolist(), merged.values.tolist()))
            stored.index_add_(0, merged.indices, merged.values)

        kv.init("table", _rows([0, 1], 5))
        kv._set_updater(update)
        kv.push("table", _rows([kv.rank, 4], 1))
        outs = [_rows([], 0), torch.zeros(6, 2).to_sparse(1)]
        kv.row_sparse_pull("table", out=outs, row_ids=[np.array([1]), torch.tensor([4, 5])])
        return seen, outs[0].values.tolist(), outs[1].to_dense()[4].tolist()

    calls = [("table", [0, 1, 4], [[1, 1], [1, 1], [2, 2]])]
    assert on(2, work) == [(calls, [[6, 6]], [2, 2])] * 2


def test_pull_leaves_sparse_outs_alone_unless_told_otherwise() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("table", _rows([1], 5, rows=3))
        out = _rows([], 0, rows=3)
        kv.pull("table", out=out)
        before = len(out.indices)
        kv.pull("table", out=out, ignore_sparse=False)
        return before, out.indices.tolist(), out.to_dense().tolist()

    assert on(1, work) == [(0, [0, 1, 2], [[0, 0], [5, 5], [0, 0]])]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_half_precision_travels_for_gradients_and_not_for_init(kind: str) -> None:
    def work(kv: KVStore) -> Any:
        kv.set_gradient_compression({"type": kind})
        kv.init("w", full(1 + 2**-12, 2))
        first = pulled(kv, "w", 2)[0]
        kv.push("w", full(1 + 2**-12, 2))
        return first, pulled(kv, "w", 2)[0]

    assert on(2, work) == [(1 + 2**-12, 2.0)] * 2


def test_compression_may_be_set_before_and_after_keys_and_changed() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("early", full(0, 1))
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.init("late", full(0, 1))
        found = []
        for _ in range(2):
            kv.push(["early", "late"], [full(0.75, 1)] * 2)
            found.append((pulled(kv, "early", 1)[0], pulled(kv, "late", 1)[0]))
        kv.set_gradient_compression({"type": "bf16"})
        kv.push("early", full(0.75, 1))
        return *found, pulled(kv, "early", 1)[0]

    assert on(2, work) == [((0, 0), (2, 2), 1.5)] * 2


def test_the_barrier_is_met_by_all() -> None:
    def work(kv: KVStore) -> Any:
        kv._barrier()
        kv.barrier()
        return True

    assert on(2, work) == [True, True]


def _in_process(group: Group) -> Any:
    first, second = kvstore.create("dist_sync"), kvstore.create("dist_device_sync_hybridpar", group)
    for store in (first, second):
        store.init([1, 2], [full(store.rank + 1, 1000), torch.full((3,), 1.0)])
        store.push([1, 2], [full(store.rank + 1, 1000), torch.full((3,), 2.0)])
    found = [
        (pulled(store, 1, 1000)[-1], pulled(store, 2, 3)[0], store.rank == group.rank) for store in (first, second)
    ]
    for store in (first, second):
        store.barrier()
        store.close()
    return found, kvstore.create("dist_sync")._group is first._group


def test_processes_create_stores_from_the_launchers_variables() -> None:
    assert run_processes(2, _in_process) == [([(3.0, 4.0, True)] * 2, True)] * 2


def test_the_example_in_the_docs_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _DOCS.read_text(), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)
    assert (scope["weights"]["bias"] == -1.5).all() and (scope["weights"]["encoder"] == -1.5).all()


def test_the_docs_name_every_store() -> None:
    text = _DOCS.read_text()
    bare = {name.removesuffix("_hybridpar").removesuffix("_perseus") for name in kvstore.known_names()}
    assert all(f"`{name}`" in text for name in bare)

"""Rows, bad input, and the traps of MXNet's own scripts, on two ranks."""

from __future__ import annotations

import gc
import logging
import re
import tempfile
from typing import Any

import numpy as np

import hybridpar as hp
import hybridpar.mxnet as face

# isort: split
import mxnet as mx
from mxnet import gluon

from tests.comm.mxnet.scripts import checks
from tests.comm.mxnet.scripts.values import SHAPE, filled, pulled, rows, store, wrong

# Rows.


def check_rows_are_summed_over_workers_and_devices() -> None:
    kv = store()
    kv.init("rows", rows(list(range(6)), 0))
    kv.push("rows", [rows([0, 2], 1), rows([2], 10)] if kv.rank == 0 else rows([2, 5], 100))
    assert pulled(kv, "rows", (6, 2))[:, 0].tolist() == [1, 0, 111, 0, 0, 100]
    kv.push("rows", rows([] if kv.rank == 0 else [1], 7))
    assert pulled(kv, "rows", (6, 2))[:, 0].tolist() == [0, 7, 0, 0, 0, 0]
    kv.push("rows", rows([], 0))
    assert not pulled(kv, "rows", (6, 2)).any()


def check_row_sparse_pull_takes_rows_in_any_order_and_repeated() -> None:
    kv = store()
    kv.init("rows", mx.nd.arange(12).reshape((6, 2)).tostype("row_sparse"))
    out = rows([], 0)
    kv.row_sparse_pull("rows", out=out, row_ids=mx.nd.array([4, 1, 4], dtype="int64"))
    assert out.indices.asnumpy().tolist() == [1, 4]
    assert out.asnumpy().tolist() == [[0, 0], [2, 3], [0, 0], [0, 0], [8, 9], [0, 0]]
    outs = [rows([], 0), rows([], 0)]
    kv.row_sparse_pull("rows", out=outs, row_ids=[mx.nd.array([0]), mx.nd.array([5])])
    assert [one.indices.asnumpy().tolist() for one in outs] == [[0], [5]]
    kv.row_sparse_pull("rows", out=outs, row_ids=mx.nd.array([0], dtype="int64"))
    assert [one.asnumpy()[0].tolist() for one in outs] == [[0, 1]] * 2, "zero rows are rows, too"
    wrong(
        ValueError, "expected whole row_ids in", lambda: kv.row_sparse_pull("rows", out=out, row_ids=mx.nd.array([6]))
    )
    wrong(ValueError, "expected row_ids for each of 1 outs, got 2",
          lambda: kv.row_sparse_pull("rows", out=out, row_ids=[mx.nd.array([1])] * 2))  # fmt: skip


def check_rows_update_a_dense_weight_as_dense_gradients_do() -> None:
    """Gluon's Embedding(sparse_grad=True): a dense weight whose gradients are rows."""
    kv = store()
    kv.init(["sparse", "dense"], [filled(1, (6, 2))] * 2)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    for numbers in ([0, 2], [2, 3]):
        gradient = rows(numbers if kv.rank == 0 else [5], 1)
        kv.push("sparse", gradient)
        kv.push("dense", gradient.tostype("default"))
    assert np.array_equal(pulled(kv, "sparse", (6, 2)), pulled(kv, "dense", (6, 2)))
    kv = store()
    kv.init("w", filled(9, (6, 2)))
    kv.push("w", rows([1], 2))
    assert pulled(kv, "w", (6, 2))[:, 0].tolist() == [0, 4, 0, 0, 0, 0]


def check_pull_leaves_a_row_sparse_out_alone_and_says_so() -> None:
    kv = store()
    kv.init("rows", rows([1], 1))
    out = rows([3], 7)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hybridpar.comm.mxnet.operators").addHandler(handler)
    kv.pull("rows", out)
    assert out.asnumpy()[3, 0] == 7 and "row_sparse_pull" in records[0].getMessage()
    wrong(TypeError, "expected a dense out; use row_sparse_pull", lambda: kv.pull("rows", out, ignore_sparse=False))


def check_dense_and_sparse_in_each_others_place_are_refused() -> None:
    kv = store()
    kv.init(["dense", "rows"], [filled(0, (6, 2)), rows([1], 1)])
    wrong(TypeError, "expected row_sparse values", lambda: kv.push("rows", filled(1, (6, 2))))
    wrong(TypeError, "expected values of one storage type", lambda: kv.push("dense", [filled(1, (6, 2)), rows([1], 1)]))
    wrong(TypeError, "pushpull of key 'rows': expected dense arrays", lambda: kv.pushpull("rows", rows([1], 1)))
    wrong(TypeError, "got a dense key", lambda: kv.row_sparse_pull("dense", rows([], 0), row_ids=mx.nd.array([1])))
    wrong(TypeError, "got a dense out", lambda: kv.row_sparse_pull("rows", filled(0, (6, 2)), row_ids=mx.nd.array([1])))
    wrong(TypeError, "got csr", lambda: kv.push("dense", filled(1, (6, 2)).tostype("csr")))
    wrong(ValueError, "expected op 'sum' for row_sparse", lambda: kv.push("rows", rows([1], 1), op="max"))


# Bad input.


def check_bad_input_is_told_with_what_was_expected_and_leaves_the_store_alone() -> None:
    kv = store()
    kv.init("w", filled(1))
    wrong(ValueError, "key 'v' is not in the store", lambda: kv.push("v", filled(0)))
    wrong(ValueError, "key 'v' is not in the store", lambda: kv.pull("v", filled(0)))
    wrong(ValueError, re.escape("expected an out like float32[3, 4], got float32[2, 2]"),
          lambda: kv.pull("w", filled(0, (2, 2))))  # fmt: skip
    wrong(TypeError, re.escape("expected an out like float32[3, 4], got int32[3, 4]"),
          lambda: kv.pull("w", filled(0, dtype="int32")))  # fmt: skip
    wrong(ValueError, re.escape("expected float32[3, 4] as initialised, got float32[4]"),
          lambda: kv.push("w", filled(0, (4,))))  # fmt: skip
    wrong(TypeError, re.escape("expected float32[3, 4] as initialised, got float64[3, 4]"),
          lambda: kv.push("w", filled(0, dtype="float64")))  # fmt: skip
    wrong(TypeError, "expected an MXNet NDArray, got ndarray", lambda: kv.push("w", np.zeros(SHAPE)))
    wrong(TypeError, "expected int or str keys", lambda: kv.push(1.5, filled(0)))
    wrong(ValueError, "expected as many values as keys", lambda: kv.push(["w"], [filled(0)] * 2))
    kv.push("w", filled(2))
    assert (pulled(kv, "w") == 4).all()


def check_shapes_that_differ_between_ranks_are_named_on_every_rank() -> None:
    kv = store()
    shape = (3,) if kv.rank == 0 else (4,)
    wrong(hp.CommunicationError, r"key 'w'(.|\n)*\[3\](.|\n)*\[4\]", lambda: kv.init("w", filled(0, shape)))
    kv = store()
    wrong(hp.CommunicationError, "key 'w'(.|\n)*float32(.|\n)*float64",
          lambda: kv.init("w", filled(0, dtype=("float32", "float64")[kv.rank])))  # fmt: skip


def check_bad_input_of_one_rank_at_init_raises_on_every_rank() -> None:
    kv = store()
    wrong(TypeError, "expected an MXNet NDArray|expected an array", lambda: kv.init("w", filled(0) if kv.rank else 3.5))


# The traps of MXNet's scripts.


def check_trap_1_a_name_that_is_not_known_is_refused_and_not_made_local() -> None:
    wrong(ValueError, "did you mean 'dist_sync_hybridpar'", lambda: face.create("dist_sync_hybridpr"))
    wrong(ValueError, "synchronous", lambda: face.create("dist_async"))
    wrong(ValueError, "expected a name with 'dist', got 'local'", lambda: face.create("local"))
    wrong(TypeError, "expected a name as text", lambda: face.create(3))


def check_trap_2_mxnet_finds_the_names_and_standard_ones_on_request() -> None:
    for name in ("dist_sync_hybridpar", "dist_device_sync_hybridpar", "dist_sync_perseus", "DIST_device_sync_PERSEUS"):
        kv = mx.kv.create(name)
        assert isinstance(kv, face.KVStore) and kv.type == name.lower()
    face.override("dist_sync")
    kv = mx.kv.create("dist_sync")
    assert isinstance(kv, face.KVStore) and kv.type == "dist_sync"
    face.restore("dist_sync")
    assert "dist_sync" not in mx.kvstore.KVStoreBase.kv_registry
    wrong(ValueError, "expected a name that was overridden", lambda: face.restore("dist_sync"))
    wrong(ValueError, "begins with 'dist'", lambda: face.override("local"))
    wrong(ValueError, "expected one of", lambda: face.override("dist_synk"))


def small_net() -> Any:
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize(mx.init.Xavier())
    return net


def step(net: Any, trainer: Any, rank: int) -> None:
    with mx.autograd.record():
        loss = (net(mx.nd.full((4, 3), rank + 1.0)) ** 2).sum()
    loss.backward()
    trainer.step(8)


def check_trap_3_a_trainer_on_one_device_uses_the_store_that_is_named() -> None:
    net = small_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync_hybridpar")
    step(net, trainer, face.create().rank)
    assert isinstance(trainer._kvstore, face.KVStore) and trainer._distributed


def slope(trainer_options: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A weight of ones [1, 1] whose gradient by ``backward`` is the input."""
    kv = store()
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    return kv, net, gluon.Trainer(net.collect_params(), "sgd", trainer_options, kvstore=kv, **options)


def backward(kv: Any, net: Any) -> None:
    """Gradients 1 and 2 on rank 0, 11 and 12 on rank 1."""
    devices = (mx.cpu(0), mx.cpu(1))
    with mx.autograd.record():
        losses = [net(mx.nd.full((1, 1), place + 1 + 10 * kv.rank, ctx=ctx)) for place, ctx in enumerate(devices)]
    mx.autograd.backward(losses)


def check_a_trainers_learning_rate_changes_on_the_store_and_off_it() -> None:
    for on_store in (True, False):
        kv, net, trainer = slope({"learning_rate": 0.5}, update_on_kvstore=on_store)
        expected = 1.0
        for rate in (0.5, 0.25, 1.0):
            trainer.set_learning_rate(rate)
            backward(kv, net)
            trainer.step(2)
            expected -= rate * 26 / 2
            assert [weight.asscalar() for weight in net.weight.list_data()] == [expected] * 2


def check_a_trainer_reduces_gradients_alone_and_adds_them_up_over_batches() -> None:
    kv, net, trainer = slope({"learning_rate": 1.0}, update_on_kvstore=False)
    net.weight.grad_req = "add"
    for _ in range(2):
        net.weight.zero_grad()
        for _ in range(3):
            backward(kv, net)
        trainer.allreduce_grads()
        assert [gradient.asscalar() for gradient in net.weight.list_grad()] == [3 * 26] * 2
        trainer.update(1)
    assert net.weight.data(mx.cpu(1)).asscalar() == 1 - 2 * 3 * 26
    kv, net, trainer = slope({"learning_rate": 1.0}, update_on_kvstore=True)
    net.weight.grad_req = "add"
    for _ in range(3):
        backward(kv, net)
    trainer.step(1)
    assert [gradient.asscalar() for gradient in net.weight.list_grad()] == [
        3 * (1 + 10 * kv.rank),
        3 * (2 + 10 * kv.rank),
    ]
    assert net.weight.data(mx.cpu(1)).asscalar() == 1 - 3 * 26


def check_parameters_whose_shapes_are_known_late_start_from_rank_0() -> None:
    kv = store()
    mx.random.seed(kv.rank)
    net = gluon.nn.Dense(2)
    net.initialize(mx.init.Normal())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1}, kvstore=kv)
    for _ in range(3):
        step(net, trainer, kv.rank)
    weights = kv._group.all_gather_json(net.weight.data().asnumpy().tolist())
    assert weights[0] == weights[1]


def check_module_fits_with_a_store_by_name_and_by_object() -> None:
    net = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="last"), name="softmax"
    )
    for given in ("dist_sync_hybridpar", store()):
        rank = store().rank
        np.random.seed(rank)  # noqa: NPY002 - initializers of mxnet draw there
        mx.random.seed(rank)
        images = np.random.default_rng(rank).normal(size=(20, 3)).astype(np.float32)
        module = mx.mod.Module(net)
        module.fit(
            mx.io.NDArrayIter(images, np.arange(20) % 4, batch_size=5),
            num_epoch=2, kvstore=given, optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            initializer=mx.init.Xavier(),
        )  # fmt: skip
        weights = store()._group.all_gather_json(
            [value.asnumpy().tolist() for value in module.get_params()[0].values()]
        )
        assert weights[0] == weights[1]
        with tempfile.TemporaryDirectory() as folder:
            module.save_optimizer_states(f"{folder}/states")
            module.load_optimizer_states(f"{folder}/states")


def check_trap_4_module_scales_by_the_batch_of_all_workers() -> None:
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="last")
    for name in ("dist_sync_hybridpar", "dist_device_sync_perseus"):
        module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
        module.bind([("data", (5, 3))], [("softmax_label", (5,))])
        module.init_params()
        module.init_optimizer(kvstore=name)
        assert module._optimizer.rescale_grad == 1 / (5 * 2)


def check_trap_5_it_is_a_kvstore_of_mxnet_and_has_no_handle_to_free() -> None:
    kv = store()
    assert isinstance(kv, mx.kvstore.KVStore) and isinstance(kv, mx.kvstore.KVStoreBase)
    kv.init("w", filled(0))
    kv.push("w", filled(1))
    out = filled(0)
    kv.pull("w", out)
    del kv
    gc.collect()
    assert (out.asnumpy() == 2).all(), "what was pushed before arrives"


def check_trap_6_init_does_not_copy_the_weights_of_rank_0_back() -> None:
    """So Module with the optimizer off the store starts from its own; with it on the store, broadcast copies them."""
    kv = store()
    mine = filled(kv.rank + 1)
    kv.init("off", mine)
    assert (mine.asnumpy() == kv.rank + 1).all()
    kv.broadcast("on", mine, out=mine)
    assert (mine.asnumpy() == 1).all()


def check_trap_7_what_a_trainer_calls_dense_and_sparse() -> None:
    calls: list[tuple[str, Any, Any]] = []

    class Recorded(face.KVStore):  # type: ignore[misc]
        def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
            calls.append(("broadcast", key, priority))
            super().broadcast(key, value, out, priority)

        def push(self, key: Any, value: Any, priority: int = 0, **options: Any) -> None:
            calls.append((f"push {value[0].stype}", key, priority))
            super().push(key, value, priority, **options)

        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
            calls.append(("pushpull", key, priority))
            super().pushpull(key, value, out, priority)

    kv = Recorded(timeout=30)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Embedding(6, 3, sparse_grad=True), gluon.nn.Dense(2, in_units=3))
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    for _ in range(2):
        with mx.autograd.record():
            loss = (net(mx.nd.array([kv.rank, 4])) ** 2).sum()
        loss.backward()
        trainer.step(2)
    assert trainer._update_on_kvstore
    dense = [place for place, one in enumerate(trainer._params) if one._grad_stype == "default"]
    (sparse,) = {0, 1, 2} - set(dense)
    once = [("broadcast", key, 0) for key in range(3)]
    twice = [("pushpull", key, -key) for key in dense]
    twice.append(("push row_sparse", sparse, -sparse))
    assert sorted(calls) == sorted(once + 2 * twice), calls
    weights = np.concatenate([parameter.data().asnumpy().ravel() for parameter in trainer._params])
    everyone = kv._group.all_gather_json(weights.tolist())
    assert everyone[0] == everyone[1]
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_states(f"{folder}/states")
        trainer.load_states(f"{folder}/states")
    assert trainer._optimizer is kv._updater.optimizer


if __name__ == "__main__":
    checks.run(globals())

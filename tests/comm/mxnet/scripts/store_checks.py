"""What MXNet promises of a KVStore, on two ranks: meaning, order and overlap."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import hybridpar as hp
import hybridpar.mxnet
from hybridpar.kvstore import Op

# isort: split
import mxnet as mx
from mxnet import gluon

from tests.comm.mxnet.scripts import checks
from tests.comm.mxnet.scripts.values import SHAPE, filled, pulled, store, wrong

# What a KVStore promises.


def check_the_value_of_rank_0_wins_and_the_arrays_stay_as_they_are() -> None:
    kv = store()
    mine = filled(kv.rank + 1)
    kv.init("w", mine)
    assert (pulled(kv, "w") == 1).all()
    assert (mine.asnumpy() == kv.rank + 1).all()


def check_init_again_raises_on_every_rank() -> None:
    kv = store()
    kv.init(3, filled(0))
    wrong(ValueError, "key 3 is initialised already", lambda: kv.init(3, filled(0)))
    wrong(ValueError, "key 4 is initialised already", lambda: kv.init([4, 4], [filled(0)] * 2))
    kv.push(3, filled(1))
    assert (pulled(kv, 3) == 2).all()


def check_int_and_str_keys_do_not_mix_in_a_call_nor_in_a_store() -> None:
    kv = store()
    wrong(TypeError, "expected keys of one type", lambda: kv.init([1, "a"], [filled(0)] * 2))
    kv.init("a", filled(0))
    wrong(TypeError, "expected keys of one type", lambda: kv.push(["a", 1], [filled(0)] * 2))
    wrong(TypeError, "expected keys of one type in a store", lambda: kv.init(1, filled(0)))


def check_without_an_updater_the_sum_over_workers_replaces_what_is_stored() -> None:
    kv = store()
    kv.init("w", filled(100))
    for step in range(3):
        kv.push("w", filled(kv.rank + step))
        assert (pulled(kv, "w") == 1 + 2 * step).all()
    assert (pulled(kv, "w") == 5).all(), "a pull changes nothing"


def check_lists_nested_lists_and_repeated_keys_sum_over_devices() -> None:
    kv = store()
    kv.init([1, 2, 3], [filled(0)] * 3)
    devices = [filled(1), filled(2), filled(3)]
    kv.push(1, devices)
    kv.push([2, 3, 2], [devices, [filled(5)], filled(10)])
    assert (pulled(kv, 1) == 12).all() and (pulled(kv, 2) == 32).all() and (pulled(kv, 3) == 10).all()
    assert [value.asnumpy()[0, 0] for value in devices] == [1, 2, 3], "pushed arrays stay as they are"
    outs = [[filled(0), filled(0)], [filled(0)]]
    kv.pull([1, 3], outs)
    assert [[out.asnumpy()[0, 0] for out in some] for some in outs] == [[12, 12], [10]]


def check_with_an_updater_a_push_runs_it_on_key_gradient_and_stored() -> None:
    kv = store()
    kv.init("w", filled(1))
    seen = []

    def updater(key: Any, gradient: Any, stored: Any) -> None:
        seen.append(key)
        stored -= 0.5 * gradient

    kv._set_updater(updater)
    for _ in range(2):
        kv.push("w", filled(kv.rank + 1))
    assert (pulled(kv, "w") == 1 - 2 * 0.5 * 3).all()
    assert seen == ["w", "w"]
    wrong(TypeError, "expected a function", lambda: kv._set_updater(3))


def check_pull_without_out_raises() -> None:
    kv = store()
    kv.init("w", filled(1))
    wrong(ValueError, "expected out", lambda: kv.pull("w"))
    wrong(ValueError, "expected out", lambda: kv.row_sparse_pull("w", row_ids=mx.nd.array([0])))


def check_pushes_of_one_key_travel_in_the_order_of_the_program() -> None:
    """Their values are computed in another order, which differs between the ranks."""
    kv = store()
    kv.init("w", mx.nd.zeros((1000,)))
    slow = mx.nd.ones((700, 700)) / 700
    quick = [mx.nd.full((1000,), number) for number in range(4)]
    outs = [mx.nd.zeros((1000,)) for _ in range(4)]
    mx.nd.waitall()
    for number, (value, out) in enumerate(zip(quick, outs, strict=True)):
        if number % 2 == kv.rank:
            for _ in range(4):
                slow = mx.nd.dot(slow, slow)
            value = value + slow.reshape((-1,))[:1000] * 0
        kv.push("w", value)
        kv.pull("w", out)
    assert [out.asnumpy().tolist() for out in outs] == [[2.0 * number] * 1000 for number in range(4)]


def check_pushpull_in_place_leaves_the_sum_in_the_array_and_in_the_store() -> None:
    kv = store()
    shapes = [(5,), (1 << 18,), ((1 << 18) + 1,), (3, 4)]  # small ones of one dimension, and others
    kv.init(list(range(len(shapes))), [mx.nd.zeros(shape) for shape in shapes])
    for step in range(1, 4):
        for key, shape in enumerate(shapes):
            values = [mx.nd.full(shape, step + kv.rank) for _ in range(3)]
            kv.pushpull(key, values[0])
            kv.pushpull(key, [values[1]], out=[values[1]])
            kv.pushpull(key, values[2], out=values[2])
            stored = mx.nd.zeros(shape)
            kv.pull(key, stored)
            for array in (*values, stored):
                assert (array.asnumpy() == 2 * step + 1).all(), (step, shape)
            values[2][:] = -1
            kv.pull(key, stored)
            assert (stored.asnumpy() == 2 * step + 1).all(), "what is stored is a copy"


def check_parts_of_one_array_are_pushed_and_filled_in_one_call() -> None:
    kv = store()
    kv.init([0, 1, 2], [mx.nd.zeros((4,))] * 3)
    whole, out = mx.nd.arange(12), mx.nd.zeros((12,))
    parts, outs = ([array[4 * k : 4 * k + 4] for k in range(3)] for array in (whole, out))
    kv.push([0, 1, 2], parts)
    kv.pull([0, 1, 2], outs)
    assert (out.asnumpy() == 2 * np.arange(12)).all()
    kv.pushpull([0, 1, 2], parts, out=outs)
    kv.pushpull(0, parts[0], out=outs[1])
    kv.pushpull([0, 1, 2], parts)
    kv.pushpull([0, 1], [parts[2], parts[2]], out=[[outs[0], outs[1]], outs[2]])
    assert (whole.asnumpy() == 2 * np.arange(12)).all()
    assert (out.asnumpy() == np.tile(4 * np.arange(8, 12), 3)).all()


def check_the_priority_of_a_push_reaches_the_reducer() -> None:
    kv = store()
    kv.init([0, 1], [filled(0)] * 2)
    seen = []
    send = kv._reducer.send

    def recorded(keys: Any, tensors: Any, **terms: Any) -> Any:
        seen.extend(zip(keys, terms["priority"], strict=True))
        return send(keys, tensors, **terms)

    kv._reducer.send = recorded
    for key in (0, 1):
        kv.pushpull(key, filled(1), priority=-key)
    kv.wait()
    assert sorted(seen) == [(0, 0), (1, -1)]


def check_two_bit_compression_keeps_a_residual_for_each_key_and_leaves_init_alone() -> None:
    kv = store()
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init(["a", "b"], [filled(0.3)] * 2)
    assert np.allclose(pulled(kv, "a"), 0.3)
    sent = []
    for _ in range(3):
        kv.push("a", filled(0.3))
        sent.append(pulled(kv, "a")[0, 0])
    # 0.3, 0.6 - sent 0.5 -, 0.4: of both workers.
    assert sent == [0, 1, 0], sent
    kv.push("b", filled(-0.7))
    assert (pulled(kv, "b") == -1).all()


def check_two_bit_compression_of_another_dtype_is_refused() -> None:
    kv = store()
    kv.init("w", filled(0, dtype="float64"))
    kv.set_gradient_compression({"type": "2bit"})
    wrong(TypeError, "push of key 'w': expected float32|2bit compression of .*expected float32, got float64",
          lambda: kv.push("w", filled(1, dtype="float64")))  # fmt: skip
    wrong(ValueError, "expected type '2bit', 'fp16' or 'bf16', got '1bit'",
          lambda: kv.set_gradient_compression({"type": "1bit"}))  # fmt: skip


def check_half_compression_sums_in_half_precision() -> None:
    for kind, error in (("fp16", 2**-11), ("bf16", 2**-8)):
        kv = store()
        kv.init("w", filled(0))
        kv.set_gradient_compression({"type": kind})
        kv.push("w", filled(0.1 * (kv.rank + 1)))
        found = pulled(kv, "w")
        assert 0 < abs(found - 0.3).max() <= 2 * error * 0.3, (kind, found)


def check_is_capable_answers_for_the_optimizer_only() -> None:
    kv = store()
    assert kv.is_capable("optimizer") and kv.is_capable("OPTIMIZER")
    wrong(ValueError, "expected 'optimizer', got 'teleport'", lambda: kv.is_capable("teleport"))


def check_max_min_and_mean_go_over_devices_and_workers() -> None:
    kv = store()
    kv.init("w", filled(0))
    devices = [filled(4 * kv.rank), filled(4 * kv.rank + 2)]  # 0, 2; 4, 6
    for op, expected in (("sum", 12), ("max", 6), ("min", 0), ("mean", 3), (Op.Max, 6)):
        kv.push("w", devices, op=op)
        assert (pulled(kv, "w") == expected).all(), op
    wrong(ValueError, "op: expected", lambda: kv.push("w", filled(0), op="product"))


def check_param_only_keys_have_no_optimizer() -> None:
    kv = store()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.init("statistics", filled(5), param_only=1)
    kv.init("w", filled(5))
    for key in ("statistics", "w"):
        kv.push(key, filled(1))
    assert (pulled(kv, "statistics") == 2).all() and (pulled(kv, "w") == 3).all()


def check_rank_local_rank_num_workers_and_type() -> None:
    kv = store("DIST_device_Sync_Perseus")
    group = kv._group
    assert (kv.rank, kv.local_rank, kv.num_workers) == (group.rank, group.rank, 2)
    assert kv.type == "dist_device_sync_perseus" and "rank" in repr(kv)
    kv._barrier()
    wrong(NotImplementedError, "no servers|there are none", lambda: kv._send_command_to_servers(0, ""))


def check_the_optimizer_in_the_store_is_mxnets_and_its_states_are_saved_and_loaded() -> None:
    def train(kv: Any, steps: int, key: str) -> Any:
        for _ in range(steps):
            kv.push(key, filled(kv.rank + 1))
        return pulled(kv, key)

    def new() -> Any:
        kv = store()
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        kv.init("w", filled(1))
        return kv

    whole, half = new(), new()
    expected = train(whole, 4, "w")
    reference = mx.nd.full(SHAPE, 1.0)
    updater = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    for _ in range(4):
        updater("w", filled(3), reference)
    assert np.array_equal(expected, reference.asnumpy())
    weights = train(half, 2, "w")
    with tempfile.TemporaryDirectory() as folder:
        half.save_optimizer_states(Path(folder) / "states")
        rest = store()
        rest.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        rest.init("w", mx.nd.array(weights))
        rest.load_optimizer_states(Path(folder) / "states")
    assert np.array_equal(train(rest, 2, "w"), expected)
    wrong(RuntimeError, "expected an optimizer in the store", lambda: store().save_optimizer_states("nowhere"))
    wrong(TypeError, "expected an mxnet.optimizer.Optimizer, got str", lambda: half.set_optimizer("sgd"))


def check_optimizers_that_differ_between_ranks_are_refused() -> None:
    kv = store()
    wrong(ValueError, "set_optimizer: expected the same optimizer on every rank",
          lambda: kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1 * (kv.rank + 1))))  # fmt: skip


# Order and overlap.


def check_many_steps_without_waiting_give_what_waiting_gives() -> None:
    kv = store()
    keys = list(range(8))
    kv.init(keys, [filled(0)] * 8)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    weights = [filled(0) for _ in keys]
    gradients = [filled(0) for _ in keys]
    for step in range(30):
        for key in keys:
            gradients[key][:] = weights[key] * 0.5 + kv.rank + step % 3  # reads what the last pull wrote
            kv.pushpull(key, gradients[key], out=weights[key], priority=-key)
    expected = 0.0
    for step in range(30):
        expected -= 2 * expected * 0.5 + 1 + 2 * (step % 3)
    assert all((weight.asnumpy() == expected).all() for weight in weights), (weights[0].asnumpy(), expected)


def check_a_pushed_array_may_be_overwritten_at_once() -> None:
    kv = store()
    kv.init("w", filled(0))
    value = filled(1)
    kv.push("w", value)
    value[:] = 1000
    assert (pulled(kv, "w") == 2).all()


def check_ranks_that_push_in_opposite_orders_do_not_block_each_other() -> None:
    kv = store()
    keys = list(range(60))
    kv.init(keys, [filled(0)] * 60)
    outs = {key: filled(0) for key in keys}
    for _ in range(3):
        for key in keys if kv.rank == 0 else reversed(keys):
            kv.push(key, filled(key))
            kv.pull(key, outs[key])
    assert all((outs[key].asnumpy() == 2 * key).all() for key in keys)


def check_a_push_in_the_middle_of_recording_does_not_enter_the_graph() -> None:
    kv = store()
    kv.init("w", filled(0))
    value = filled(2)
    value.attach_grad()
    with mx.autograd.record():
        loss = (value * value).sum()
        kv.push("w", value)
        kv.pull("w", filled(0))
    loss.backward()
    assert (value.grad.asnumpy() == 4).all() and (pulled(kv, "w") == 4).all()


def check_a_fork_while_a_push_is_on_its_way_does_not_hang() -> None:
    """MXNet stops its engine before a fork, and the data loaders of Gluon fork."""
    kv = store()
    kv.init("w", filled(0))
    kv.barrier()
    if kv.rank == 1:
        time.sleep(0.5)
    kv.push("w", filled(1))
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (pulled(kv, "w") == 2).all()
    loader = gluon.data.DataLoader(gluon.data.SimpleDataset(list(range(8))), batch_size=4, num_workers=1)
    kv.push("w", filled(2))
    assert [batch.asnumpy().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (pulled(kv, "w") == 4).all()


def check_data_loaders_with_two_workers_run_beside_pushes() -> None:
    kv = store()
    kv.init("w", filled(0))
    images, labels = np.arange(32 * 12, dtype=np.float32).reshape(32, 3, 4), np.arange(32)
    for threads in (False, True):
        kv.push("w", filled(1))
        loader = gluon.data.DataLoader(
            gluon.data.ArrayDataset(images, labels), batch_size=8, num_workers=2, thread_pool=threads
        )
        for number, (image, label) in enumerate(loader):
            kv.push("w", image[0] * 0 + number)
            assert label.asnumpy().tolist() == labels[8 * number : 8 * number + 8].tolist()
            assert np.array_equal(image.asnumpy(), images[8 * number : 8 * number + 8])
        assert (pulled(kv, "w") == 2 * 3).all()


def check_a_store_that_is_given_up_ends_its_threads() -> None:
    def alive() -> int:
        gc.collect()
        return sum(thread.name in ("hybridpar-any-order", "hybridpar-rows") for thread in threading.enumerate())

    deadline = time.monotonic() + 10
    kv = store()
    kv.init("w", filled(0))
    if kv.rank == 1:
        time.sleep(0.3)
    kv.push("w", filled(1))
    del kv
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(), [thread.name for thread in threading.enumerate()]


def check_several_stores_in_one_process_have_keys_of_their_own() -> None:
    one, two = store(), store()
    for kv, value in ((one, 1), (two, 10)):
        kv.init("w", filled(0))
        kv.push("w", filled(value))
    assert (pulled(two, "w") == 20).all() and (pulled(one, "w") == 2).all()
    one.close()
    two.push("w", filled(1))
    assert (pulled(two, "w") == 2).all()


def check_a_timeline_shows_when_pushes_travel() -> None:
    timeline = hp.Timeline(rank=0)
    kv = store(timeline=timeline)
    kv.init(["w", "v"], [filled(0)] * 2)
    timeline.clear()
    for _ in range(3):
        kv.pushpull(["w", "v"], [filled(1), filled(2)])
        kv.wait()
    spans = [event for event in timeline.recording().events if event.name == "send"]
    assert sum(int(event.args["bytes"]) for event in spans) == 3 * 2 * 4 * 12
    assert {event.row for event in spans} == {"lane 0"} and all((event.end or 0) > event.begin for event in spans)


if __name__ == "__main__":
    checks.run(globals())

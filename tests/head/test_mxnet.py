"""The head under MXNet: losses and gradients of a dense MXNet network, labels, scaling, and what happens to errors."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import textwrap
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None, reason="needs mxnet (pip install 'hybridpar[mxnet]')"
)

START = """
import json
import numpy as np
import torch
import hybridpar as hp
import hybridpar.mxnet
import mxnet as mx
from hybridpar.comm.kvstore.arrays import as_tensor
from hybridpar.head.mxnet import ShardedHead, class_ids

torch.set_num_threads(1)
group = hp.init(timeout=20)
results = {}

def outcome(call):
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]
"""
END = "\nprint('RESULTS' + json.dumps(results))\n"


def run(text: str, ranks: int) -> list[dict[str, Any]]:
    """What a program stores in ``results``, by rank."""
    statuses, outputs = run_program(START + textwrap.dedent(text) + END, ranks)
    assert statuses == [0] * ranks, outputs
    return [json.loads(out.partition("RESULTS")[2]) for out, _ in outputs]


# Three steps of two ranks, with uneven batches, uneven shards and an ignored label, beside one dense network that sees
# the global batch and is written with MXNet's operators alone.
AGAINST_DENSE = """
from mxnet.gluon import nn

CLASSES, WIDTH, SCALE = 11, 8, 16.0
SIZES = [3, 5]
random = np.random.RandomState(5)

def network():
    net = nn.HybridSequential()
    net.add(nn.Dense(12, in_units=6, activation="tanh"), nn.Dense(WIDTH, in_units=12))
    net.initialize()
    weights = np.random.RandomState(1)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(0.4 * weights.randn(*parameter.shape)))
    return net

def dense_loss(features, rows, labels, margin):
    unit = features / features.norm(axis=1, keepdims=True)
    cosine = mx.nd.dot(unit, rows / rows.norm(axis=1, keepdims=True), transpose_b=True)
    valid = labels >= 0
    target = mx.nd.one_hot(mx.nd.maximum(labels, 0), CLASSES)
    own = (cosine * target).sum(axis=1)
    shifted = {"ArcFace": lambda: mx.nd.cos(mx.nd.arccos(own) + 0.3), "CosFace": lambda: own - 0.3}[margin]()
    logits = SCALE * (cosine + target * mx.nd.expand_dims(shifted - own, 1))
    losses = -(mx.nd.log_softmax(logits) * target).sum(axis=1)
    return (losses * valid).sum() / valid.sum()

def trainer(parameters, store):
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}
    return mx.gluon.Trainer(parameters, "sgd", options, kvstore=store, update_on_kvstore=False)

def worst(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())

for margin in ("ArcFace", "CosFace"):
    net, twin = network(), network()
    classifier = hp.ShardedClassifier(
        WIDTH, CLASSES, margin=getattr(hp, margin)(scale=SCALE, margin=0.3), initial_std=0.5, seed=3, group=group
    )
    sgd = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    head = ShardedHead(classifier, sgd)
    mine = classifier.layout.class_ids(group.rank).numpy()
    every = classifier.class_centers(torch.arange(CLASSES)).numpy()
    rows = mx.gluon.Parameter("rows", shape=(CLASSES, WIDTH))
    rows.initialize()
    rows.set_data(mx.nd.array(every))
    ours = trainer(list(net.collect_params().values()), mx.kv.create("dist_sync_hybridpar"))
    theirs = trainer([*twin.collect_params().values(), rows], None)
    compared = results[margin] = []
    for step in range(3):
        images = random.randn(sum(SIZES), 6).astype("float32")
        labels = random.randint(0, CLASSES, sum(SIZES))
        labels[2] = -1
        part = slice(sum(SIZES[: group.rank]), sum(SIZES[: group.rank + 1]))
        with mx.autograd.record():
            loss = head(net(mx.nd.array(images[part])), labels[part])
        loss.backward()
        ours.step(1)
        with mx.autograd.record():
            expected = dense_loss(twin(mx.nd.array(images)), rows.data(), mx.nd.array(labels), margin)
        expected.backward()
        theirs.step(1)
        head.collect_gradients()
        differences = {
            "loss": worst(loss.asnumpy(), expected.asnumpy()),
            "head gradient": worst(classifier.weight.grad, rows.grad().asnumpy()[mine]),
        }
        for one, other in zip(net.collect_params().values(), twin.collect_params().values()):
            differences[f"gradient of {one.shape}"] = worst(one.grad().asnumpy(), other.grad().asnumpy())
            differences[f"updated {one.shape}"] = worst(one.data().asnumpy(), other.data().asnumpy())
        sgd.step()
        head.zero_grad()
        differences["updated rows"] = worst(classifier.weight.detach(), rows.data().asnumpy()[mine])
        compared.append([float(loss.asscalar()), differences])
"""


@pytest.mark.parametrize("margin", ["ArcFace", "CosFace"])
def test_two_ranks_train_as_one_dense_network_of_mxnet_does(against_dense: list[dict[str, Any]], margin: str) -> None:
    first, second = ranks = [result[margin] for result in against_dense]
    assert [loss for loss, _ in first] == [loss for loss, _ in second]
    for steps in ranks:
        assert len(steps) == 3 and all(len(differences) == 11 for _, differences in steps)
        worst = {name: value for _, differences in steps for name, value in differences.items() if not value < 3e-5}
        assert not worst


@pytest.fixture(scope="module")
def against_dense() -> list[dict[str, Any]]:
    return run(AGAINST_DENSE, 2)


# One rank: the torch head itself says what is right.
ALONE = """
def heads(**options):
    settings = {"margin": hp.ArcFace(scale=16.0, margin=0.3), "initial_std": 0.5, "group": group} | options
    classifier = hp.ShardedClassifier(8, 20, **settings)
    return ShardedHead(classifier, torch.optim.SGD(classifier.parameters(), lr=0.5))

def array(*shape, kind=mx.nd):
    return kind.random.normal(0, 1, shape)

def expected(head, features, labels, factor=1.0):
    # (loss, feature gradient, row gradient) of torch
    tensor = torch.tensor(features.asnumpy(), requires_grad=True)
    weight = head.classifier.weight
    loss = head.classifier(tensor, torch.tensor(labels))
    return loss.item(), *(g * factor for g in torch.autograd.grad(loss, [tensor, weight]))

def close(found, wanted):
    found = found.asnumpy() if hasattr(found, "asnumpy") else found
    return bool(np.allclose(found, wanted, rtol=1e-5, atol=1e-7))

labels = [0, 5, 19, 7]
head, features = heads(), array(4, 8)
features.attach_grad()
weight = head.classifier.weight

# whatever is done to the loss afterwards
value, by_features, by_rows = expected(head, features, labels, 0.25)
with mx.autograd.record():
    loss = head(features, np.array(labels))
    less = loss / 4
less.backward()
head.collect_gradients()
results["scaled"] = [loss.asscalar().item() == value, close(features.grad, by_features), close(weight.grad, by_rows)]

# added up, by arrays whose gradients are added to
head.zero_grad()
features.attach_grad("add")
for _ in range(2):
    with mx.autograd.record():
        loss = head(features, np.array(labels)) / 4
    loss.backward()
head.collect_gradients()
results["added up"] = [close(features.grad, 2 * by_features), close(weight.grad, 2 * by_rows)]

# two losses of one graph
head.zero_grad()
features.attach_grad()
others = [1, 1, 2, 3]
more = expected(head, features, others, 2.0)
with mx.autograd.record():
    both = head(features, np.array(labels)) / 4 + head(features, np.array(others)) * 2
both.backward()
head.collect_gradients()
results["two losses"] = [close(features.grad, by_features + more[1]), close(weight.grad, by_rows + more[2])]

# dropped, or without a backward pass
with mx.autograd.record():
    loss = head(features, np.array(labels))
loss.backward()
head.zero_grad()
with mx.autograd.record():
    head(features, np.array(labels))
head.collect_gradients()
results["nothing left"] = weight.grad is None

# the optimizer's step collects by itself
before = weight.detach().clone()
with mx.autograd.record():
    loss = head(features, np.array(labels)) / 4
loss.backward()
head.optimizer.step()
results["step collects"] = close(weight.detach(), before - 0.5 * by_rows)

# without recording: the value and no more
head = heads()
value = expected(head, features, labels)[0]
loss = head(features, np.array(labels))
head.collect_gradients()
results["not recorded"] = [loss.asscalar().item() == value, head.classifier.weight.grad is None]

# training is what MXNet says it is
seen = []
head.classifier.register_forward_pre_hook(lambda module, inputs: seen.append((module.training, inputs[0].data_ptr())))
head(features, np.array(labels))
with mx.autograd.record():
    head(features, np.array(labels))
with mx.autograd.record(train_mode=False):
    head(features, np.array(labels))
results["training"] = [training for training, _ in seen]
results["same memory"] = all(pointer == as_tensor(features).data_ptr() for _, pointer in seen)

# frozen rows, rows of float64, features of float16, ignored labels
head = heads(dtype=torch.float64)
head.classifier.weight.requires_grad_(False)
half = features.astype("float16")
half.attach_grad()
with mx.autograd.record():
    loss = head(half, np.array([-1, 5, -1, 7]))
loss.backward()
results["types"] = [loss.dtype.__name__, half.grad.dtype.__name__, np.abs(half.grad.asnumpy()).sum(1).tolist()]
results["frozen"] = head.classifier.weight.grad is None
half = (features * 64).astype("float16")  # long features have small gradients
half.attach_grad()
results["times 65536"] = []
for times in (1.0, 65536.0):
    with mx.autograd.record():
        loss = head(half, np.array([1, 5, 2, 7])) * times
    loss.backward()
    results["times 65536"].append((half.grad.asnumpy().astype(np.float64) / times).tolist())

# arrays of mx.np
head, features = heads(), array(4, 8, kind=mx.np)
features.attach_grad()
value, by_features, _ = expected(head, features, labels)
with mx.autograd.record():
    loss = head(features, mx.np.array(labels))
loss.backward()
results["mx.np"] = [
    type(loss).__module__, type(head(features, mx.np.array(labels))).__module__,
    loss.item() == value, close(features.grad, by_features),
]

# labels of many types
million, huge = 1 << 20, (1 << 24) + 1
nd = mx.nd.array
results["labels"] = {
    "float32": outcome(lambda: class_ids(nd([3, 7, -1]), 1 << 24).tolist()),
    "float32, too many": outcome(lambda: class_ids(nd([3]), huge)),
    "float16, too many": outcome(lambda: class_ids(nd([3], dtype="float16"), million)),
    "float64": outcome(lambda: class_ids(np.array([16777217.0]), huge + 1).tolist()),
    "int64": outcome(lambda: class_ids(nd([huge], dtype="int64"), huge + 1).tolist()),
    "int32": outcome(lambda: class_ids(nd([5], dtype="int32"), huge).tolist()),
    "tensor": outcome(lambda: class_ids(torch.tensor([5]), huge).tolist()),
    "fraction": outcome(lambda: class_ids(nd([3, 7.5]), 20)),
    "NaN": outcome(lambda: class_ids(nd([float("nan")]), 20)),
    "infinity": outcome(lambda: class_ids(nd([float("inf")]), 20)),
    "bool": outcome(lambda: class_ids(np.array([True]), 20)),
    "list": outcome(lambda: class_ids([1, 2], 20)),
}
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(ALONE, 1)[0]


def test_a_factor_of_the_loss_reaches_features_and_rows(alone: dict[str, Any]) -> None:
    assert alone["scaled"] == [True] * 3


def test_gradients_add_up_over_losses(alone: dict[str, Any]) -> None:
    assert alone["added up"] == [True, True]
    assert alone["two losses"] == [True, True]


def test_dropped_gradients_and_losses_without_backward_leave_nothing(alone: dict[str, Any]) -> None:
    assert alone["nothing left"]


def test_the_optimizer_collects_before_it_steps(alone: dict[str, Any]) -> None:
    assert alone["step collects"]


def test_without_recording_there_is_a_value_and_no_gradient(alone: dict[str, Any]) -> None:
    assert alone["not recorded"] == [True, True]


def test_training_mode_is_that_of_mxnet(alone: dict[str, Any]) -> None:
    assert alone["training"] == [False, True, False]


def test_the_head_reads_the_memory_of_mxnet(alone: dict[str, Any]) -> None:
    assert alone["same memory"]


def test_types_are_kept_and_ignored_samples_have_no_gradient(alone: dict[str, Any]) -> None:
    loss, gradient, sums = alone["types"]
    assert (loss, gradient) == ("float64", "float16")
    assert [value > 0 for value in sums] == [False, True, False, True]
    assert alone["frozen"]


def test_gradients_of_float16_bear_a_factor_that_float16_does_not(alone: dict[str, Any]) -> None:
    plain, scaled = map(np.array, alone["times 65536"])
    assert 0 < abs(plain).max() < 0.9  # so that what is scaled is within float16
    np.testing.assert_allclose(scaled, plain, rtol=2e-3, atol=1e-6)


def test_arrays_of_mx_np_are_taken_and_given_back(alone: dict[str, Any]) -> None:
    assert alone["mx.np"] == ["mxnet.numpy", "mxnet.numpy", True, True]


def test_labels_are_taken_where_they_hold_every_class_id_exactly(alone: dict[str, Any]) -> None:
    labels = alone["labels"]
    assert labels["float32"] == [3, 7, -1]
    assert labels["float64"] == labels["int64"] == [2**24 + 1]
    assert labels["int32"] == labels["tensor"] == [5]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("float32, too many", "TypeError", "expected int64 for 16,777,217 classes, got torch.float32.*16,777,216"),
        ("float16, too many", "TypeError", "expected int64 for 1,048,576 classes, got torch.float16.*2,048"),
        ("fraction", "ValueError", "expected class ids, got 7.5 at position 1"),
        ("NaN", "ValueError", "expected class ids, got nan at position 0"),
        ("infinity", "ValueError", "expected class ids, got inf at position 0"),
        ("bool", "TypeError", "expected int64, got torch.bool"),
        ("list", "TypeError", "expected an array, got list"),
    ],
)
def test_labels_that_are_no_class_ids_are_refused(alone: dict[str, Any], name: str, kind: str, said: str) -> None:
    found, message = alone["labels"][name]
    assert found == kind
    assert re.search(said, message), message


# Rank 1 makes a mistake, rank 0 does not; afterwards both go on.
MISTAKES = """
classifier = hp.ShardedClassifier(8, 20, group=group)
head = ShardedHead(classifier, torch.optim.SGD(classifier.parameters(), lr=0.1))
features, labels = mx.nd.ones((2, 8)), np.array([1, 2])
wrong = {
    "label": lambda: head(features, np.array([1, 20])),
    "fraction": lambda: head(features, mx.nd.array([1, 2.5])),
    "labels of a list": lambda: head(features, [1, 2]),
    "features of NumPy": lambda: head(features.asnumpy(), labels),
    "sparse features": lambda: head(features.tostype("csr"), labels),
    "integer features": lambda: head(features.astype("int32"), labels),
    "width": lambda: head(mx.nd.ones((2, 9)), labels),
    "NaN": lambda: head(features * float("nan"), labels),
    "failed operator": lambda: head(mx.nd.linalg.potrf(-mx.nd.ones((8, 8)))[:2], labels),
}
for name, mistake in wrong.items():
    with mx.autograd.record():
        results[name] = outcome(mistake if group.rank == 1 else lambda: head(features, labels))
        results[name].append(mx.autograd.is_recording())
with mx.autograd.record():
    loss = head(features, labels)
results["afterwards"] = loss.asscalar().item()
"""


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, Any]]:
    return run(MISTAKES, 2)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("label", "ValueError", "expected class ids in [0, 20), or -1 to ignore a sample, got 20 at position 1"),
        ("fraction", "ValueError", "labels: expected class ids, got 2.5 at position 1"),
        ("labels of a list", "TypeError", "expected an array, got list"),
        ("features of NumPy", "TypeError", "features: expected an NDArray of mxnet, got ndarray"),
        ("sparse features", "TypeError", "expected a dense array, got a csr NDArray of shape [2, 8]"),
        ("integer features", "TypeError", "features: expected floats, got torch.int32"),
        ("width", "ValueError", "features: expected shape [batch, 8], got [2, 9]"),
        ("NaN", "NonFiniteError", "16 of 16 values"),
        ("failed operator", "MXNetError|RuntimeError", "potrf"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_both(
    mistakes: list[dict[str, Any]], name: str, kind: str, said: str
) -> None:
    for result in mistakes:
        found, message, still_recording = result[name]
        assert found in kind.split("|") and said in message, message
        assert still_recording


def test_ranks_go_on_after_a_mistake(mistakes: list[dict[str, Any]]) -> None:
    first, second = (result["afterwards"] for result in mistakes)
    assert first == second and math.isfinite(first)

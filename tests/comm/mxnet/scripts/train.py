"""Trains small models for a few steps with a store of MXNet's, and saves the parameters of every worker.

    train.py FOLDER STORE CASE [CASE ...]

STORE is ``dist_sync`` for MXNet's own servers, in processes that MXNet's variables started (one case to a run, since
keys live on the servers as long as those), or a name of hybridpar's. Nothing else differs between the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

if sys.argv[2] == "dist_sync":
    np.bool = bool  # as mxnet expects
else:
    import hybridpar.mxnet  # noqa: F401

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, sym

STEPS, BATCH, WORDS, CLASSES = 20, 6, 30, 5
TWO_BITS = {"type": "2bit", "threshold": 0.5}


def batches(rank):
    """Images, words and labels that differ from worker to worker."""
    draw = np.random.RandomState(100 + rank)
    for _ in range(STEPS):
        yield (
            mx.nd.array(draw.randn(BATCH, 3, 8, 8).astype(np.float32)),
            mx.nd.array(draw.randint(0, WORDS, (BATCH, 4)).astype(np.float32)),
            mx.nd.array(draw.randint(0, CLASSES, (BATCH,)).astype(np.float32)),
        )


class Net(gluon.Block):
    """Convolutions, whose gradients oneDNN keeps in layouts of its own, dense layers, an embedding with sparse rows."""

    def __init__(self, sparse):
        super().__init__(prefix="net_")
        self.sparse = sparse
        with self.name_scope():
            self.convolutions = gluon.nn.Sequential(prefix="convolutions_")
            with self.convolutions.name_scope():
                self.convolutions.add(gluon.nn.Conv2D(16, 3, in_channels=3, activation="relu"))
                self.convolutions.add(gluon.nn.Conv2D(16, 3, in_channels=16, activation="relu"))
            self.wide = gluon.nn.Dense(40, in_units=16 * 16, activation="tanh")
            if sparse:
                self.rows = gluon.contrib.nn.SparseEmbedding(WORDS, 8)
            self.last = gluon.nn.Dense(CLASSES, in_units=40 + (8 if sparse else 0))

    def forward(self, images, words):
        features = self.wide(self.convolutions(images))
        if self.sparse:
            features = mx.nd.concat(features, self.rows(words).mean(axis=1), dim=1)
        return self.last(features)


def with_gluon(kv, optimizer, options, *, sparse=False, on_store=None, lr=0.05):
    mx.random.seed(7 + kv.rank)  # other initial values on each worker: those of worker 0 must win
    np.random.seed(7 + kv.rank)  # noqa: NPY002 - initializers of mxnet draw there
    net = Net(sparse)
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(
        net.collect_params(),
        optimizer,
        # A weight that is sparse starts the store before the first step, which must not change the scale any more.
        {"learning_rate": lr, "rescale_grad": 1 / (BATCH * kv.num_workers), **options},
        kvstore=kv,
        update_on_kvstore=on_store,
    )
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for images, words, labels in batches(kv.rank):
        with autograd.record():
            value = loss(net(images, words), labels)
        value.backward()
        trainer.step(1)
    everything = {}
    for name, parameter in net.collect_params().items():
        if parameter._stype == "row_sparse":
            parameter = parameter.row_sparse_data(mx.nd.arange(WORDS, dtype="int64")).tostype("default")
        else:
            parameter = parameter.data()
        everything[name] = parameter.asnumpy()
    return everything


def by_hand(kv, *, optimizer=None, lr=0.05):
    """Gradients compressed to 2 bits, which MXNet's own store does in push, but not in the pushpull of its Trainer."""
    mx.random.seed(7 + kv.rank)
    np.random.seed(7 + kv.rank)  # noqa: NPY002 - initializers of mxnet draw there
    net = Net(sparse=False)
    net.initialize(mx.init.Xavier())
    kv.set_gradient_compression(TWO_BITS)
    parameters = net.collect_params()
    if optimizer is not None:
        kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=lr, **MOMENTUM))
    for key, parameter in parameters.items():
        kv.init(key, parameter.data())
        kv.pull(key, parameter.data())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for images, words, labels in batches(kv.rank):
        with autograd.record():
            value = loss(net(images, words), labels)
        value.backward()
        for place, (key, parameter) in enumerate(parameters.items()):
            kv.push(key, parameter.grad(), priority=-place)
            if optimizer is None:
                total = mx.nd.zeros(parameter.shape)
                kv.pull(key, total, priority=-place)
                parameter.data()[:] -= lr / 10 * total
            else:
                kv.pull(key, parameter.data(), priority=-place)
    return {name: parameter.data().asnumpy() for name, parameter in parameters.items()}


def symbol(sparse):
    data, words = sym.Variable("data"), sym.Variable("words")
    features = sym.FullyConnected(sym.Flatten(data), num_hidden=24, name="wide")
    features = sym.Activation(features, act_type="tanh")
    if sparse:
        rows = sym.Variable("rows_weight", stype="row_sparse")
        looked_up = sym.sparse.Embedding(words, weight=rows, input_dim=WORDS, output_dim=8, sparse_grad=True)
        features = sym.concat(features, sym.mean(looked_up, axis=1), dim=1)
    else:
        features = sym.concat(features, words / WORDS, dim=1)  # small, lest rounding grow from step to step
    return sym.SoftmaxOutput(sym.FullyConnected(features, num_hidden=CLASSES, name="last"), name="softmax")


def with_module(kv, optimizer, options, *, sparse=False, lr=0.05):
    mx.random.seed(7 + kv.rank)
    np.random.seed(7 + kv.rank)  # noqa: NPY002 - initializers of mxnet draw there
    module = mx.mod.Module(symbol(sparse), data_names=("data", "words"), label_names=("softmax_label",))
    module.bind([("data", (BATCH, 3, 8, 8)), ("words", (BATCH, 4))], [("softmax_label", (BATCH,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=kv, optimizer=optimizer, optimizer_params={"learning_rate": lr, **options})
    for images, words, labels in batches(kv.rank):
        batch = mx.io.DataBatch([images, words], [labels])
        if sparse:
            rows = mx.nd.array(np.unique(words.asnumpy()), dtype="int64")
            module.prepare(batch, sparse_row_id_fn=lambda _, rows=rows: {"rows_weight": rows})
        module.forward_backward(batch)
        module.update()
    arguments, _ = module.get_params()
    return {name: value.tostype("default").asnumpy() for name, value in arguments.items()}


MOMENTUM = {"momentum": 0.9, "wd": 1e-3}
CASES = {
    "gluon_sparse_on_store": lambda kv: with_gluon(kv, "sgd", MOMENTUM, sparse=True),
    "gluon_adam_on_store": lambda kv: with_gluon(kv, "adam", {"wd": 1e-3}, on_store=True, lr=0.01),
    "gluon_off_store": lambda kv: with_gluon(kv, "sgd", MOMENTUM, on_store=False),
    "by_hand_2bit_on_store": lambda kv: by_hand(kv, optimizer="sgd"),
    "by_hand_2bit_off_store": by_hand,
    "module_sparse_on_store": lambda kv: with_module(kv, "sgd", MOMENTUM, sparse=True),
    "module_off_store": lambda kv: with_module(kv, "sgd", MOMENTUM),
}


def main(folder, store, *cases):
    for case in cases:
        kv = mx.kv.create(store)
        parameters = CASES[case](kv)
        np.savez(Path(folder) / f"{case}.{kv.rank}.npz", **parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])

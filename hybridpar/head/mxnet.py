"""``ShardedHead``: a class-sharded head under a backbone of MXNet.

# Note [the loss as a line]
The torch side computes value, feature gradient G and row gradients in one go, as the head is called. MXNet then gets
the loss as a function that it can differentiate by itself: ``value + <features - features0, G>``, where features0 are
the same features with the gradient blocked. Its value is the loss to the bit, because the bracket is zero, and its
gradient by the features is G, whatever is done to the loss afterwards, and whether a gradient is written or added.
No Python runs inside MXNet's engine, where an error would lose its type and a collective would hold up a worker.
What the row gradients must be multiplied by, such as 0.5 after ``(loss * 0.5).backward()``, is the gradient of
an anchor: a zero that is added to the loss. It is read when the row gradients are collected.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

import hybridpar.comm.mxnet  # noqa: F401 - before mxnet

# isort: split
import mxnet as mx
import numpy as np

from hybridpar.comm.kvstore.arrays import as_tensor, is_mxnet, wait_to_read
from hybridpar.comm.mxnet.arrays import NDArray, from_torch
from hybridpar.head.classifier import ShardedClassifier


class _Pending(NamedTuple):
    """Row gradients of one loss, to be multiplied by the gradient of ``anchor``."""

    anchor: NDArray
    gradients: tuple[Tensor, ...]


class ShardedHead:
    """Calls ``hp.ShardedClassifier`` with arrays of MXNet, and gives MXNet a loss that it can differentiate.

    ::

        head = ShardedHead(classifier, torch.optim.SGD(classifier.parameters(), lr=0.1))
        with mx.autograd.record():
            loss = head(net(images), labels)
        loss.backward()
        trainer.step(1)          # gluon.Trainer(..., kvstore=mx.kv.create("dist_sync_hybridpar"))
        head.optimizer.step()
        head.zero_grad()

    The loss is the mean over the global batch, the same on every rank, and each rank's feature gradient is the
    derivative of that mean. So the gradients of the backbone are to be SUMMED over the ranks and not divided:
    ``Trainer.step(1)``, as above, and not ``step(batch_size)``. A KVStore of type dist sums, as MXNet's own does.

    Features go in and gradients come out without a copy: torch and MXNet look at the same memory. As with Gluon's
    blocks, the head is in training mode inside ``mx.autograd.record()`` (or ``train_mode()``).

    Args:
        classifier: the head; its rows live on the device that the features will live on.
        optimizer: torch's, over the classifier's parameters. Before each step it collects the gradients.

    Attributes:
        classifier, optimizer: as given.
    """

    def __init__(self, classifier: ShardedClassifier, optimizer: torch.optim.Optimizer) -> None:
        if classifier.row_optimizer is not None:
            raise ValueError(
                "ShardedHead: expected a head whose rows an optimizer of torch steps, got one with "
                f"{type(classifier.row_optimizer.policy).__name__}; build it without optimizer="
            )
        self.classifier, self.optimizer = classifier, optimizer
        self._pending: list[_Pending] = []
        optimizer.register_step_pre_hook(lambda *_: self.collect_gradients())

    def __call__(self, features: NDArray, labels: NDArray) -> NDArray:
        """Mean loss of the global batch. Collective.

        Args:
            features: NDArray (or mx.np.ndarray) [b, D] of floats; b may differ between ranks.
            labels: class ids [b], or ``ignore_index``: NDArray, NumPy array or tensor, best of int64. Floats, MXNet's
                habit, are taken only where they hold every class id exactly: float32 up to 16,777,216 classes.

        Returns:
            Array [1], float32 (float64 for float64 rows). ``backward()`` goes on into the backbone.

        Raises:
            TypeError: features or labels are no dense arrays, or labels of a type that cannot hold the class ids.
            ValueError: wrong shapes, or labels that are no class ids.
            NonFiniteError: NaN or Inf among the features, or in the rows.
            mxnet.MXNetError: an operator that computes the features failed; a RuntimeError on the other ranks.
            CommunicationError: a rank did not take part.
            All but the last are raised on every rank where they are on one.
        """
        recording, training = mx.autograd.is_recording(), mx.autograd.is_training()
        self.classifier.train(training)
        # What happens in here is not part of MXNet's graph. An error leaves the recording as it was.
        with mx.autograd.pause(train_mode=training):
            features_bD, labels_b = self._read(features, labels)
            if not recording:
                with torch.no_grad():
                    return _like(features, from_torch(self.classifier(features_bD, labels_b).reshape(1)))
            loss, gradient_bD, by_parameter = self._differentiate(features_bD, labels_b)
            anchor = mx.nd.zeros_like(loss)
            anchor.attach_grad("add")
        self._pending.append(_Pending(anchor, by_parameter))
        plain = features.as_nd_ndarray()  # mx.np arrays have other operators
        away = plain - mx.nd.BlockGrad(plain)
        if np.dtype(plain.dtype) == np.float16:  # a factor such as 65536, usual with these, is infinite among them
            away, gradient_bD = away.astype(loss.dtype), gradient_bD.astype(loss.dtype)
        return _like(features, loss + anchor + (away * gradient_bD).sum().astype(loss.dtype))

    def collect_gradients(self) -> None:
        """Add what ``backward()`` asked for to ``.grad`` of the classifier's parameters.

        ``optimizer.step()`` does so too. To be called before where gradients are looked at, as
        ``hp.clip_grad_norm_`` does. A loss whose ``backward()`` was not called adds nothing.
        """
        pending, self._pending = self._pending, []
        for anchor, gradients in pending:
            factor = float(anchor.grad.asscalar())
            if factor == 0.0:
                continue
            for parameter, gradient in zip(self._trained(), gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient if factor == 1.0 else gradient.mul_(factor)
                else:
                    parameter.grad.add_(gradient, alpha=factor)

    def zero_grad(self) -> None:
        """Drop all gradients of the classifier, collected or not."""
        self._pending.clear()
        self.classifier.zero_grad()

    def _read(self, features: NDArray, labels: NDArray) -> tuple[Tensor, Tensor]:
        """Views of both. What is wrong with them is told to the other ranks, which otherwise would wait."""
        try:
            if not is_mxnet(features):
                raise TypeError(f"features: expected an NDArray of mxnet, got {type(features).__name__}")
            wait_to_read(features)
            features_bD = as_tensor(features)
            if not features_bD.is_floating_point():
                raise TypeError(f"features: expected floats, got {features_bD.dtype}")
            return features_bD, class_ids(labels, self.classifier.num_classes).to(features_bD.device)
        except (TypeError, ValueError, mx.MXNetError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        classifier = self.classifier
        nothing = classifier.weight.new_zeros(0, classifier.embedding_size)
        local = classifier._local_batch(nothing, torch.zeros(0, dtype=torch.int64, device=nothing.device))
        classifier._exchange(local._replace(error=error))
        raise AssertionError("the exchange raises what it is told")

    def _differentiate(self, features_bD: Tensor, labels_b: Tensor) -> tuple[NDArray, NDArray, tuple[Tensor, ...]]:
        """Loss [1] and feature gradient [b, D] for MXNet, and the gradients of the parameters."""
        with torch.enable_grad():
            loss = self.classifier(features_bD.requires_grad_(), labels_b)
        gradient_bD, *by_parameter = torch.autograd.grad(loss, [features_bD, *self._trained()])
        if loss.is_cuda:  # MXNet knows nothing of torch's streams
            torch.cuda.current_stream(loss.device).synchronize()
        return from_torch(loss.detach().reshape(1)), from_torch(gradient_bD), tuple(by_parameter)

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.classifier.parameters() if parameter.requires_grad]


def class_ids(labels: NDArray, num_classes: int) -> Tensor:
    """Labels as int64 [b].

    Args:
        labels: NDArray, NumPy array or tensor of integers, or of floats that are whole.
        num_classes: K.

    Raises:
        TypeError: no array, or floats too short for K classes.
        ValueError: a fraction, NaN or Inf.
    """
    wait_to_read(labels)
    ids = as_tensor(labels)
    if ids.dtype == torch.bool or ids.is_complex():
        raise TypeError(f"labels: expected int64, got {ids.dtype}")
    if ids.is_floating_point():
        exact = int(2 / torch.finfo(ids.dtype).eps)
        if num_classes > exact:
            raise TypeError(
                f"labels: expected int64 for {num_classes:,} classes, got {ids.dtype}, which holds whole numbers "
                f"exactly only up to {exact:,}; make them int64 where they are read, such as NumPy arrays"
            )
        whole = ids == ids.trunc()  # false for NaN
        whole &= ids.isfinite()
        if not bool(whole.all()):
            position = int((~whole).flatten().nonzero()[0])
            raise ValueError(f"labels: expected class ids, got {float(ids.flatten()[position])} at position {position}")
    return ids.to(torch.int64)


def _like(features: NDArray, loss: NDArray) -> NDArray:
    """The loss as an array of the kind that the features are: mx.nd or mx.np."""
    return loss if features.as_nd_ndarray() is features else loss.as_np_ndarray()

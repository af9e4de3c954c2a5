"""The training step in Gluon: backbone gradients summed by the KVStore, the head cut by class."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridpar as hp
import hybridpar.mxnet  # before mxnet

# isort: split
import mxnet as mx

from hybridpar.comm.mxnet.arrays import from_torch
from hybridpar.head.mxnet import ShardedHead
from recipes.common.config import GradientsConfig
from recipes.common.optimizers import options_kept
from recipes.insightface.config import TrainConfig
from recipes.insightface.gluon.backbone import GluonBackbone, TorchFace, view
from recipes.insightface.inputs import Batch
from recipes.insightface.learner import Learner, StepResult, Timelines, build_optimizer
from recipes.insightface.recognizer import build_head
from recipes.insightface.verification import embed

STORE = "dist_sync_hybridpar"
COMPRESSION = {"same": None, "bfloat16": {"type": "bf16"}, "float16": {"type": "fp16"}}


class GluonLearner(Learner):
    """A Gluon backbone under a ``gluon.Trainer``, and a sharded head under torch's SGD.

    Args:
        config: of the run.
        num_classes: K.
        group: the ranks.
        timeline: none; see the errors.

    Raises:
        ValueError: the configuration asks for what there is only in the torch recipe.
    """

    framework = "MXNet"

    def __init__(self, config: TrainConfig, num_classes: int, group: hp.Group, timeline: Timelines) -> None:
        check_supported(config)
        self._config, self._group = config, group
        mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(torch.get_num_threads()))
        self.backbone = GluonBackbone(config)
        classifier = build_head(config, num_classes, group, torch.device("cpu"))
        self.head = ShardedHead(classifier, build_optimizer(config.optimizer, list(classifier.parameters())))
        options = config.optimizer
        # What mx.kv.create(STORE) makes, but of the ranks that there are already.
        self._store = hybridpar.mxnet.create(STORE, group=group, timeout=config.timeout)
        self.trainer = mx.gluon.Trainer(
            list(self.backbone.trained.values()),
            "sgd",
            {"learning_rate": 0.0, "momentum": options.momentum, "wd": options.weight_decay},
            kvstore=self._store,
            compression_params=COMPRESSION[config.gradients.wire],
            update_on_kvstore=False,  # gradients come back, and are clipped together with the head's
        )

    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        self.trainer.set_learning_rate(learning_rate)
        for parameters in self.head.optimizer.param_groups:
            parameters["lr"] = learning_rate
        self.head.zero_grad()
        kept = [(parameter, parameter.data().copy()) for parameter in self.backbone.moving.values()]
        try:
            loss = self._backward(micro_batches)
            self.trainer.allreduce_grads()
            self.head.collect_gradients()
            rows = [(f"head.{name}", each) for name, each in self.head.classifier.named_parameters()]
            clip = self._config.optimizer.clip or math.inf
            norm = hp.clip_grad_norm_([*self.backbone.with_gradients(), *rows], clip, error_if_nonfinite=True)
        except hp.NonFiniteError:
            for parameter, before in kept:
                parameter.set_data(before)
            raise
        self.trainer.update(1)  # the loss is a mean already
        self.head.optimizer.step()
        return StepResult(loss, float(norm))

    def _backward(self, micro_batches: Iterable[Batch]) -> float:
        """Gradients of the mean over the micro-batches, of this rank's samples. Returns that mean."""
        total, count = 0.0, self._config.accumulate
        if count > 1:
            for parameter in self.backbone.trained.values():
                parameter.zero_grad()
        for batch in micro_batches:
            with mx.autograd.record():
                loss = self.head(self.backbone.net(from_torch(batch.images)), batch.labels) / count
            loss.backward()
            total += float(loss.asscalar())
        return total

    def share_buffers(self) -> None:
        for parameter in self.backbone.moving.values():
            self._group.broadcast(view(parameter.data()))

    def embed(self, images: Tensor, *, flip: bool) -> Tensor:
        return embed(TorchFace(self.backbone.net), images, flip=flip)

    def save(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        model = self.backbone.torch_model(step)
        momenta = MomentumOfGluon(list(model.parameters()))
        for index, parameter in enumerate(model.parameters()):
            momentum = self._updater.states.get(index)  # none before the first step, and where it is 0
            if momentum is not None:
                momenta.state[parameter] = {"momentum": view(momentum)}
        return hp.checkpoint.save(
            directory,
            step=step,
            model=model,
            head=self.head.classifier,
            optimizer={"backbone": momenta, "head": self.head.optimizer},
            extra=extra,
            keep=keep,
            group=self._group,
        )

    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        model = copy.deepcopy(self.backbone.torch_model(0))  # memory of its own: MXNet does not see what torch writes
        momenta = MomentumOfGluon(list(model.parameters()))
        with options_kept([self.head.optimizer]):
            found = hp.checkpoint.load(
                directory,
                model=model,
                head=self.head.classifier,
                optimizer={"backbone": momenta, "head": self.head.optimizer},
                group=self._group,
            )
        self.backbone.load(model.state_dict())
        for index, parameter in enumerate(model.parameters()):
            if parameter in momenta.state:
                self._updater.states[index] = from_torch(momenta.state[parameter]["momentum"]).copy()
                self._updater.states_synced[index] = True
        return found

    @property
    def _updater(self) -> Any:
        """What the trainer applies its optimizer by; its ``states`` are momenta by the number of the parameter."""
        return self.trainer._updaters[0]

    def close(self) -> None:
        self._store.wait()
        self._store.close()

    def export(self, folder: Path) -> list[Path]:
        """``backbone-symbol.json`` and ``backbone-0000.params``, for ``mx.gluon.SymbolBlock.imports``."""
        self.backbone.net(mx.nd.zeros((1, *self._config.data.image_shape)))  # what has never run has no symbol
        self.backbone.net.export(str(folder / "backbone"))
        return [folder / "backbone-symbol.json", folder / "backbone-0000.params"]


class MomentumOfGluon(torch.optim.Optimizer):
    """Carries the momenta of MXNet's SGD into checkpoints, under a name of their own: unlike torch's they contain the
    learning rate."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("gluon.Trainer takes the steps")


def check_supported(config: TrainConfig) -> None:
    """Raises ValueError where the configuration asks for what there is only in the torch recipe."""
    others = replace(config.gradients, interfaces=(), wire="same")
    only_there = {
        "--mode data": config.mode != "hybrid",
        "--model.sync-batch-norm": config.model.sync_batch_norm,
        "--optimizer.name adamw": config.optimizer.name != "sgd",
        "--precision bfloat16": config.precision != "float32",
        "--head.optimizer other than shared": config.head.optimizer != "shared",
        "--gradients options but wire and interfaces": others != GradientsConfig(),
    }
    asked = [option for option, wanted in only_there.items() if wanted]
    if asked:
        raise ValueError(
            f"expected options that go with MXNet, got {', '.join(asked)}; leave them out, or use "
            "recipes.insightface.train, which has them"
        )

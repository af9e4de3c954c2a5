"""A Gluon backbone seen from torch: the same weights under the names of its torch counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hybridpar.mxnet  # noqa: F401 - before mxnet

# isort: split
import mxnet as mx

from hybridpar.comm.kvstore.arrays import as_tensor, wait_to_read, wait_to_write
from hybridpar.comm.mxnet.arrays import from_torch
from recipes.insightface.config import TrainConfig
from recipes.insightface.gluon.convnet import ConvNet
from recipes.insightface.models import build_model

BUILDERS = {"convnet": ConvNet}
"""Models that there are in Gluon too."""

_TORCH_NAMES = {"gamma": "weight", "beta": "bias", "alpha": "weight"}
_COUNTER = "num_batches_tracked"  # torch's batch normalisation counts, MXNet's does not

Parameter = Any  # mxnet.gluon.Parameter


class GluonBackbone:
    """A hybridised Gluon network with the initial weights that the torch recipe would have drawn.

    Args:
        config: of the run.

    Attributes:
        net: the network: NDArray [B, C, H, W] to NDArray [B, D].
        parameters: Gluon's, by the torch model's names, moving statistics included; in the torch model's order.

    Raises:
        ValueError: a model that does not exist in Gluon, or an option that it does not have.
    """

    def __init__(self, config: TrainConfig) -> None:
        model = config.model
        if model.name not in BUILDERS:
            raise ValueError(
                f"--model.name: expected a model that there is in MXNet, {', '.join(BUILDERS)}, got {model.name}"
            )
        torch.manual_seed(config.seed)
        mx.random.seed(config.seed)  # of dropout
        options: dict[str, Any] = {
            "image_shape": config.data.image_shape, "embedding_size": model.embedding_size, **model.options
        }  # fmt: skip
        self._twin = build_model(model.name, **options)
        self.net = BUILDERS[model.name](**options)
        self.net.initialize()
        # Adding up over micro-batches needs gradients that stay.
        self.net.collect_params().setattr("grad_req", "write" if config.accumulate == 1 else "add")
        self.net.hybridize(static_alloc=True, static_shape=True)
        named = {_torch_name(name): each for name, each in self.net._collect_params_with_prefix().items()}
        self.parameters = {name: named.pop(name) for name in self._twin.state_dict() if not name.endswith(_COUNTER)}
        assert not named, f"not in the torch model: {list(named)}"
        self.load(self._twin.state_dict())

    @property
    def trained(self) -> dict[str, Parameter]:
        """Those that the optimizer moves, by name."""
        return {name: each for name, each in self.parameters.items() if each.grad_req != "null"}

    @property
    def moving(self) -> dict[str, Parameter]:
        """The moving statistics of batch normalisation, by name."""
        return {name: each for name, each in self.parameters.items() if each.grad_req == "null"}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of a torch model's ``state_dict``."""
        for name, parameter in self.parameters.items():
            parameter.set_data(from_torch(state[name]))
        mx.nd.waitall()  # the tensors are the caller's again

    def torch_model(self, step: int) -> nn.Module:
        """The torch model, over the memory of the Gluon parameters: to be saved, and not to be kept.

        Args:
            step: what torch's batch normalisation would have counted.
        """
        views = {name: view(parameter.data()) for name, parameter in self.parameters.items()}
        counters = {name: torch.tensor(step) for name in self._twin.state_dict() if name.endswith(_COUNTER)}
        self._twin.load_state_dict(views | counters, assign=True)
        return self._twin

    def with_gradients(self) -> list[tuple[str, Tensor]]:
        """Views of the trained parameters, by name, with views of their gradients; MXNet is done with them."""
        result = []
        for name, parameter in self.trained.items():
            tensor = view(parameter.data())
            tensor.grad = view(parameter.grad())
            result.append((f"backbone.{name}", tensor))
        return result


class TorchFace(nn.Module):
    """A Gluon network called with tensors, in predict mode: what ``verification.embed`` asks for."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self._net = net

    def forward(self, images: Tensor) -> Tensor:
        embeddings = self._net(from_torch(images))
        wait_to_read(embeddings)
        return as_tensor(embeddings)


def view(array: Any) -> Tensor:
    """A tensor over an NDArray's memory, once MXNet has done what it was asked to do with it."""
    wait_to_write(array)
    return as_tensor(array)


def _torch_name(name: str) -> str:
    parent, _, last = name.rpartition(".")
    return f"{parent}.{_TORCH_NAMES.get(last, last)}"

"""Batch normalisation over the global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridpar.comm.group import Group


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) with the statistics of all ranks, in float32 or float64.

    [N, C, ...] -> the same, mean [C], variance [C], count. Below two values a channel every rank raises ValueError.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.ndim) if d != 1]
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        count = x.numel() // x.shape[1]
        wide = x.to(exact)
        mean_c = wide.mean(dims) if count else torch.zeros(x.shape[1], dtype=exact, device=x.device)
        squares_c = (wide - _along_channels(mean_c, x)).square_().sum(dims)
        message = torch.cat([mean_c, squares_c, mean_c.new_full((1,), count)])
        means, squares, counts = group.all_gather(message[None]).split([x.shape[1], x.shape[1], 1], dim=1)
        # Chan et al. 1979: combining means and sums of squares of parts without cancellation.
        total = counts.sum()
        if count < 2 and total < 2:  # a rank that has two values need not wait for the device to know
            raise ValueError(f"expected more than one value a channel over all ranks when training, got {int(total)}")
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normal = (wide - _along_channels(mean, x)) * _along_channels(inverse, x)
        ctx.save_for_backward(normal, inverse, total)
        ctx.group, ctx.dims, ctx.dtype = group, dims, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normal, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        normal, inverse, total = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        mean_grad, mean_product = ctx.group.all_reduce(sums) / total
        result = grad - _along_channels(mean_grad, grad) - normal * _along_channels(mean_product, grad)
        return (result * _along_channels(inverse, grad)).to(ctx.dtype), None, None


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm*d`` whose training statistics are those of the global batch, for any split of it over the ranks.

    On one rank, and in evaluation mode, it is plain batch normalisation. Works on CPU and CUDA. Gradients follow
    "sum everywhere": sum the gradients of weight and bias over the ranks, as ``hp.DataParallel`` does.

    Args:
        num_features: C, channels of inputs [N, C] or [N, C, ...]; N may differ between ranks and may be 0.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d.
        group: the ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected [N, {self.num_features}, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] -> the same shape and dtype. Collective in training mode.

        Raises:
            ValueError: wrong shape; or fewer than two values a channel in the global batch (on every rank).
        """
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        normal, mean, variance, total = _Normalize.apply(input, self.eps, self.group)  # type: ignore[no-untyped-call]
        if self.running_mean is not None:
            self._track(mean, variance, total)
        output: Tensor = normal
        if self.affine:
            output = output * _along_channels(self.weight, input) + _along_channels(self.bias, input)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert(cls, module: nn.Module, group: Group) -> nn.Module:
        """``module`` with every batch normalisation in it replaced by one over ``group``; tensors are shared."""
        replaced: dict[nn.Module, SyncBatchNorm] = {}

        def converted(old: nn.Module) -> nn.Module:
            if not isinstance(old, nn.modules.batchnorm._BatchNorm) or isinstance(old, cls):
                return old
            if old not in replaced:
                new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, group=group)
                new._parameters, new._buffers = old._parameters, old._buffers
                replaced[old] = new.train(old.training)
            return replaced[old]

        for parent in list(module.modules()):
            # Not named_children(): it leaves out the second name of a module that has two.
            for name, child in list(parent._modules.items()):
                if child is not None:
                    setattr(parent, name, converted(child))
        return converted(module)

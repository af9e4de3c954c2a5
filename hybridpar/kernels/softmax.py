"""The doors of csrc/margin_softmax.cc: a softmax over more classes than fit in memory, chunk by chunk.

The compiled kernels serve the CPU and, where CuPy can compile them, CUDA; the references serve elsewhere. Shapes: C
classes of a chunk, B samples. A chunk lies class by class: see Note [class by class] in csrc/margin_softmax.h.
``exact`` is float64 for float64 products, else float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridpar.kernels import _native, cuda, softmax_cuda, softmax_reference
from hybridpar.kernels.packing import CODES
from hybridpar.kernels.softmax_reference import Chunk, Own, exact_dtype


def add_exponentials(chunk: Chunk, own: Own, maximum_B: Tensor, total_B: Tensor, out_CB: Tensor) -> Tensor:
    """Take one more chunk into a running log-sum-exp (Milakov and Gimelshein 2018).

    Args:
        chunk: its products, and what makes logits of them.
        own: the samples whose own class is in this chunk, with their logits.
        maximum_B, total_B: exact; become the maximum of the logits so far, and the sum of exp(logit - maximum) so far.
            At first -inf and 0. A logit that is NaN or inf makes the total NaN.
        out_CB: becomes exp(logit - maximum) * inverse_norm, and 0 for own classes; of the dtype of the products, and
            may be the products. Elsewhere than on the CPU it may be bfloat16 or float16 for float32 products.

    Returns:
        The factor [B] by which anything accumulated against the old maximum must be multiplied.
    """
    module = _module(chunk)
    if module is None and not chunk.products.is_cpu:
        return softmax_reference.add_exponentials(chunk, own, maximum_B, total_B, out_CB)
    _check(chunk, own, module, out_CB, maximum_B, total_B)
    if module is not None:
        rescale_B = softmax_cuda.add_exponentials(module, chunk, own, maximum_B, total_B, out_CB)
    else:
        rescale_B = torch.empty_like(maximum_B)
        _native.add_exponentials(
            _chunk(chunk), _own(own), out_CB.data_ptr(),
            maximum_B.data_ptr(), total_B.data_ptr(), rescale_B.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
    increment_version([maximum_B, total_B, out_CB])
    return rescale_B


def to_probabilities(
    chunk: Chunk,
    own: Own,
    maximum_B: Tensor,
    log_total_B: Tensor,
    counts_B: Tensor,
    out_CB: Tensor,
    sums_C: Tensor | None,
) -> None:
    """exp((logit - maximum) - log_total) * count, and the values of ``own`` for own classes.

    Maximum and logarithm of the total are subtracted one after the other: added up first, they would lose digits.

    Args:
        chunk: as for ``add_exponentials``.
        maximum_B, log_total_B, counts_B: exact.
        out_CB: where they go, as for ``add_exponentials``.
        sums_C: exact; becomes their sum for each class, before they are rounded. None where nobody needs it.
    """
    module = _module(chunk)
    if module is None and not chunk.products.is_cpu:
        return softmax_reference.to_probabilities(chunk, own, maximum_B, log_total_B, counts_B, out_CB, sums_C)
    _check(chunk, own, module, out_CB, maximum_B, log_total_B, counts_B, sums_C)
    if module is not None:
        softmax_cuda.to_probabilities(module, chunk, own, maximum_B, log_total_B, counts_B, out_CB, sums_C)
    else:
        _native.to_probabilities(
            _chunk(chunk), _own(own), out_CB.data_ptr(), maximum_B.data_ptr(),
            log_total_B.data_ptr(), counts_B.data_ptr(), 0 if sums_C is None else sums_C.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
    increment_version([out_CB] if sums_C is None else [out_CB, sums_C])
    return None


def _module(chunk: Chunk) -> cuda.Module | None:
    """What launches the kernels on the device of the products; None on the CPU, and where the references serve."""
    return None if chunk.products.is_cpu else cuda.find_for("margin_softmax", chunk.products)


def _chunk(chunk: Chunk) -> _native.Chunk:
    classes, batch = chunk.products.shape
    return _native.Chunk(
        chunk.products.data_ptr(), CODES[chunk.products.dtype], classes, batch,
        0 if chunk.inverse_norms is None else chunk.inverse_norms.data_ptr(),
        0 if chunk.bias is None else chunk.bias.data_ptr(), chunk.scale,
    )  # fmt: skip


def _own(own: Own) -> _native.OwnSamples:
    return _native.OwnSamples(len(own.classes), own.classes.data_ptr(), own.samples.data_ptr(), own.values.data_ptr())


def _check(chunk: Chunk, own: Own, module: cuda.Module | None, out_CB: Tensor, *exact: Tensor | None) -> None:
    products_CB = chunk.products
    outputs = (products_CB.dtype,) if module is None else softmax_cuda.OUTPUTS.get(products_CB.dtype, ())
    if products_CB.dtype not in CODES or out_CB.dtype not in outputs or out_CB.shape != products_CB.shape:
        raise TypeError(
            f"expected products and results of one floating-point dtype and shape, got {products_CB.dtype} "
            f"{tuple(products_CB.shape)} and {out_CB.dtype} {tuple(out_CB.shape)}"
        )
    wanted = exact_dtype(products_CB.dtype)
    beside = [tensor for tensor in (chunk.inverse_norms, chunk.bias, own.values, *exact) if tensor is not None]
    if not all(tensor.dtype == wanted and tensor.is_contiguous() for tensor in beside):
        raise TypeError(f"expected contiguous {wanted} beside the products, got {[tensor.dtype for tensor in beside]}")
    if not (products_CB.is_contiguous() and out_CB.is_contiguous()):
        raise ValueError(f"expected contiguous products and results, got strides {products_CB.stride()}")
    cuda.check_one_device(products_CB, out_CB, own.classes, own.samples, *beside)

"""The doors of csrc/row_update.cc: rows of a head are read, measured, and updated by their optimizer in one pass.

The compiled kernels serve the CPU and, where CuPy can compile them, CUDA; the references serve elsewhere. Shapes: n
rows of a head, C of them at a time, D embedding size. ``exact`` is float64 for float64 rows, else float32: all
arithmetic, and norms.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridpar.kernels import _native, cuda, rows_cuda, rows_reference
from hybridpar.kernels.packing import CODES
from hybridpar.kernels.rows_reference import Adagrad, AdamW, Gradient, Rounding, Rows, Sgd
from hybridpar.kernels.softmax_reference import exact_dtype


def load_rows(rows: Rows, out: Tensor) -> None:
    """``out`` [C, D], of any of the four floating-point dtypes, becomes the rows."""
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.load_rows(rows, out)
    _check(rows, out, count=rows.size)
    if module is not None:
        rows_cuda.load_rows(module, rows, out)
    else:
        _native.load_rows(_rows(rows), out.data_ptr(), CODES[out.dtype], torch.get_num_threads())
    return increment_version(out)


def measure_rows(rows: Rows) -> None:
    """``rows.inverse_norms`` become those of the rows: 1 / max(norm, 1e-12); NaN where the row holds one."""
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.measure_rows(rows)
    _check(rows)
    if module is not None:
        rows_cuda.measure_rows(module, rows)
    else:
        _native.measure_rows(_rows(rows), torch.get_num_threads())
    return _written(rows.inverse_norms)


def project_gradient(rows: Rows, gradient: Gradient, out: Tensor) -> None:
    """``out`` [C, D], of the dtype of the rows, becomes the gradient by the rows: Note [projection] in row_update.h."""
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.project_gradient(rows, gradient, out)
    _check(rows, gradient.values, out, count=rows.size)
    if out.dtype != rows.weight.dtype:
        raise TypeError(f"expected a gradient of {rows.weight.dtype}, as the rows, got {out.dtype}")
    if module is not None:
        rows_cuda.project_gradient(module, rows, gradient, out)
    else:
        _native.project_gradient(_rows(rows), _gradient(gradient), out.data_ptr(), torch.get_num_threads())
    return _written(out)


def step_sgd(rows: Rows, gradient: Gradient, momentum: Tensor | None, policy: Sgd, rounding: Rounding) -> None:
    """One step of torch.optim.SGD for these rows, and their new norms.

    Args:
        momentum: [n, D] of any of the four dtypes; None where the policy has none.
        rounding: of rows and momentum, where they are bfloat16.
    """
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.step_sgd(rows, gradient, momentum, policy, rounding)
    _check(rows, gradient.values, count=rows.size)
    _check(rows, momentum, count=len(rows.weight))
    if module is not None:
        rows_cuda.step_sgd(module, rows, gradient, momentum, policy, rounding)
    else:
        _native.step_sgd(
            _rows(rows), _gradient(gradient), _state(momentum), _native.Sgd(*policy), _native.Rounding(*rounding),
            torch.get_num_threads(),
        )  # fmt: skip
    return _written(rows.weight, rows.inverse_norms, momentum)


def step_adamw(
    rows: Rows, gradient: Gradient, first: Tensor, second: Tensor, steps: Tensor, policy: AdamW, rounding: Rounding
) -> None:
    """One step of torch.optim.AdamW for these rows, each by the number of its own steps, and their new norms.

    Args:
        first, second: moments, [n, D] of any of the four dtypes.
        steps: int64 [n]; grow by 1 first.
        rounding: of rows and moments, where they are bfloat16.
    """
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.step_adamw(rows, gradient, first, second, steps, policy, rounding)
    _check(rows, gradient.values, count=rows.size)
    _check(rows, first, second, count=len(rows.weight))
    if steps.dtype != torch.int64 or not steps.is_contiguous() or len(steps) != len(rows.weight):
        raise TypeError(f"expected steps as contiguous int64 [{len(rows.weight)}], got {steps.dtype} {steps.shape}")
    cuda.check_one_device(rows.weight, steps)
    if module is not None:
        rows_cuda.step_adamw(module, rows, gradient, first, second, steps, policy, rounding)
    else:
        _native.step_adamw(
            _rows(rows), _gradient(gradient), _state(first), _state(second), steps.data_ptr(), _native.AdamW(*policy),
            _native.Rounding(*rounding), torch.get_num_threads(),
        )  # fmt: skip
    return _written(rows.weight, rows.inverse_norms, first, second, steps)


def step_adagrad(rows: Rows, gradient: Gradient, sums: Tensor, policy: Adagrad, rounding: Rounding) -> None:
    """One step of Adagrad with one second moment a row, and the new norms.

    Args:
        sums: exact [n]; grow by the mean of the squared gradient first.
        rounding: of rows, where they are bfloat16.
    """
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.step_adagrad(rows, gradient, sums, policy, rounding)
    _check(rows, gradient.values, count=rows.size)
    _check_exact(rows, sums)
    cuda.check_one_device(rows.weight, sums)
    if module is not None:
        rows_cuda.step_adagrad(module, rows, gradient, sums, policy, rounding)
    else:
        _native.step_adagrad(
            _rows(rows), _gradient(gradient), sums.data_ptr(), _native.Adagrad(*policy), _native.Rounding(*rounding),
            torch.get_num_threads(),
        )  # fmt: skip
    return _written(rows.weight, rows.inverse_norms, sums)


def advance_rows(rows: Rows, momentum: Tensor | None, matrices: Tensor, rounding: Rounding) -> None:
    """What steps without a gradient do: (w, m) becomes (a w + b m, c w + d m).

    Args:
        matrices: float64 [C, 4], a to d of each row.
        momentum, rounding: as for ``step_sgd``.
    """
    module = _module(rows)
    if module is None and not rows.weight.is_cpu:
        return rows_reference.advance_rows(rows, momentum, matrices, rounding)
    _check(rows, momentum, count=len(rows.weight))
    if matrices.dtype != torch.float64 or matrices.shape != (rows.size, 4) or not matrices.is_contiguous():
        raise TypeError(f"expected contiguous float64 [{rows.size}, 4], got {matrices.dtype} {tuple(matrices.shape)}")
    cuda.check_one_device(rows.weight, matrices)
    if module is not None:
        rows_cuda.advance_rows(module, rows, momentum, matrices, rounding)
    else:
        _native.advance_rows(
            _rows(rows), _state(momentum), matrices.data_ptr(), _native.Rounding(*rounding), torch.get_num_threads()
        )
    return _written(rows.weight, rows.inverse_norms, momentum)


def _module(rows: Rows) -> cuda.Module | None:
    """What launches the kernels on the device of the rows; None on the CPU, and where the references serve."""
    return None if rows.weight.is_cpu else cuda.find_for("row_update", rows.weight)


def _rows(rows: Rows) -> _native.Rows:
    return _native.Rows(
        rows.weight.data_ptr(), CODES[rows.weight.dtype], rows.weight.shape[1], rows.size,
        0 if rows.indices is None else rows.indices.data_ptr(), rows.first,
        0 if rows.inverse_norms is None else rows.inverse_norms.data_ptr(),
    )  # fmt: skip


def _gradient(gradient: Gradient) -> _native.Gradient:
    return _native.Gradient(gradient.values.data_ptr(), CODES[gradient.values.dtype], float(gradient.factor))


def _state(state: Tensor | None) -> _native.State:
    return _native.State(0, _native.FLOAT32) if state is None else _native.State(state.data_ptr(), CODES[state.dtype])


def _check(rows: Rows, *beside: Tensor | None, count: int = 0) -> None:
    """``beside``: [count, D]."""
    weight, indices = rows.weight, rows.indices
    if weight.dim() != 2 or weight.dtype not in CODES or not weight.is_contiguous():
        raise TypeError(f"expected contiguous floating-point rows [n, D], got {weight.dtype} {tuple(weight.shape)}")
    if indices is None:
        if not 0 <= rows.first <= rows.first + rows.size <= len(weight):
            raise ValueError(f"expected rows within [0, {len(weight)}), got {rows.size} from {rows.first} on")
    elif indices.dtype != torch.int64 or indices.shape != (rows.size,) or not indices.is_contiguous():
        raise TypeError(f"expected indices as contiguous int64 [{rows.size}], got {indices.dtype} {indices.shape}")
    for tensor in beside:
        if tensor is None:
            continue
        if tensor.dtype not in CODES or tensor.shape != (count, weight.shape[1]) or not tensor.is_contiguous():
            raise TypeError(
                f"expected contiguous floating point [{count}, {weight.shape[1]}] beside the rows, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    if rows.inverse_norms is not None:
        _check_exact(rows, rows.inverse_norms)
    cuda.check_one_device(weight, indices, rows.inverse_norms, *beside)


def _check_exact(rows: Rows, values: Tensor) -> None:
    exact = exact_dtype(rows.weight.dtype)
    if values.dtype != exact or values.shape != (len(rows.weight),) or not values.is_contiguous():
        raise TypeError(f"expected contiguous {exact} [{len(rows.weight)}], got {values.dtype} {tuple(values.shape)}")


def _written(*tensors: Tensor | None) -> None:
    """Lets autograd notice that values saved for backward have changed."""
    increment_version([tensor for tensor in tensors if tensor is not None and not tensor.is_inference()])

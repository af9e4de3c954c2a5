"""The compiled kernels (csrc/bindings.cc). No argument is converted: another dtype or layout raises TypeError.

Tensor i is (pointers[i], counts[i], dtypes[i]); pointer 0 is a missing one. `geometry_at` is empty when all tensors
are contiguous; else geometry_at[i] is -1 for a contiguous tensor, or the place in `geometry` of its
(dimensions, shape..., strides in elements...). The pointers must stay valid during the call, which releases the GIL.
"""

import numpy as np
import numpy.typing as npt

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int

def pack(
    pointers: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    dtypes: npt.NDArray[np.uint8],
    geometry_at: npt.NDArray[np.int64],
    geometry: npt.NDArray[np.int64],
    bucket: int,
    bucket_count: int,
    bucket_dtype: int,
    scale: float,
) -> int:
    """Gather the tensors into the bucket, return the number of non-finite source values."""

def unpack(
    bucket: int,
    bucket_count: int,
    bucket_dtype: int,
    pointers: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    dtypes: npt.NDArray[np.uint8],
    geometry_at: npt.NDArray[np.int64],
    geometry: npt.NDArray[np.int64],
    scale: float,
) -> int:
    """Scatter the bucket into the tensors, return the number of non-finite bucket values that were read."""

"""The compiled kernels (csrc/bindings.cc). No argument is converted: another dtype or layout raises TypeError.

Tensor i is (pointers[i], counts[i], dtypes[i]); pointer 0 is a missing one. `geometry_at` is empty when all tensors
are contiguous; else geometry_at[i] is -1 for a contiguous tensor, or the place in `geometry` of its
(dimensions, shape..., strides in elements...). The pointers must stay valid during the call, which releases the GIL.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int
INT64: int
UINT8: int

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

def compressed_bound(count: int, dtype: int) -> int:
    """Bytes that ``count`` compressed values take at most."""

def compress_exponents(values: int, count: int, dtype: int, target: int) -> int:
    """Write values in a shorter form, return its bytes. See csrc/exponents.h."""

def expand_exponents(source: int, bytes: int, values: int, count: int, dtype: int, add: bool) -> None:
    """The inverse; with ``add``, add to the values."""

def process_start(process: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it is gone or dead, -1 where the system does not say."""

def communicator_bytes(size: int, chunk_bytes: int) -> int:
    """Bytes of shared memory that a Communicator of ``size`` ranks needs."""

class Communicator:
    """Collectives between ranks of one host (csrc/shm.h). Addresses and sizes are int64; calls release the GIL.

    What the other ranks did wrong raises RuntimeError, and so does every later call.
    """

    def __init__(
        self,
        memory: int,
        rank: int,
        processes: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        job_ranks: npt.NDArray[np.int64],
        chunk_bytes: int,
        cores: int,
        timeout: float,
    ) -> None:
        """``memory``: communicator_bytes(...) of it, shared by all ranks, aligned to a page, zero at first.

        Of each rank: process id, its ``process_start``, and the number by which errors name it. ``cores``: how many
        they may run on together.
        """

    def all_reduce(self, data: int, count: int, dtype: int, reduction: int) -> None:
        """In place. ``reduction``: 0 sum, 1 maximum, 2 minimum."""

    def all_gather(self, outputs: npt.NDArray[np.int64], bytes: npt.NDArray[np.int64], input: int) -> None: ...
    def reduce_scatter(
        self, output: int, inputs: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], dtype: int
    ) -> None: ...
    def all_to_all(
        self,
        outputs: npt.NDArray[np.int64],
        received: npt.NDArray[np.int64],
        inputs: npt.NDArray[np.int64],
        sent: npt.NDArray[np.int64],
    ) -> None:
        """``received``, ``sent``: bytes of each output and input. RuntimeError on every rank where two differ."""

    def broadcast(self, data: int, bytes: int, root: int) -> None: ...
    def barrier(self) -> None: ...
    def add_buckets(self, base: int, stride: int, number: int) -> None:
        """From now on rank r's bucket is ``stride`` bytes at base + r * stride. ``number``: not 0.

        all_reduce, all_gather and reduce_scatter whose tensor, or parts one behind the other, lie in it copy nothing
        into other memory.
        """

    def drop_buckets(self, base: int) -> None: ...
    def abort(self, why: str) -> None:
        """Make every rank's present and later calls raise, saying why this rank cannot go on (if not empty)."""

    def leave(self) -> None:
        """The last call; returns when no other is running."""

    @property
    def calls_inside(self) -> int:
        """Threads that are inside a call just now."""

class EngineInbox:
    """Functions of MXNet's engine (csrc/engine_inbox.h). Arrays are handles; where MXNet fails, RuntimeError is raised.

    ``functions``: addresses of what ``EngineApi`` names, in that order. ``copied``: for each array that is copied its
    handle, an address, and bytes, one behind the other.
    """

    def __init__(self, functions: list[int]) -> None: ...
    def is_plain(self, array: int, like: int) -> bool:
        """Whether it is dense, in memory of the host and of one dimension, with the dtype and length of another one."""

    def push(
        self, number: int, reads: list[int], writes: list[int], copied: list[int], back: bool, priority: int, name: str
    ) -> None:
        """A function that copies arrays to their addresses and then waits for ``complete``.

        ``number``: above 0, used once. ``back``: copied back when it is completed without an error.
        """

    def push_copies(self, reads: list[int], writes: list[int], copied: list[int], priority: int, name: str) -> None:
        """A function that fills arrays from their addresses, and ends."""

    def follow(self, number: int, array: int, address: int, bytes: int) -> bool:
        """Fill an array from memory that function ``number`` holds, when that is complete; now, if it is already.

        False, and the array stays as it is, if the function has not run yet, the array is in use, or any has failed.
        """

    def wait(self) -> bool:
        """Returns when there is something to take; False after ``stop``."""

    def take(self) -> list[tuple[int, bool, str]]:
        """Numbers of functions that have run (True), or were skipped and have ended; why copying failed, if it did."""

    def complete(self, numbers: list[int], error: str) -> int:
        """With an error, if it is not empty. How many of them had run and were not completed before."""

    def wait_idle(self, seconds: float) -> bool:
        """Whether no function with a number is in the engine, now or within this time."""

    def stop(self, why: str) -> None:
        """From now on functions complete with this error as they run, and those that wait do so now."""

class Arrivals:
    """Which tensors have arrived in a round, by bucket (csrc/arrivals.h). At first it knows no tensor.

    ``counting``: hooks may add arrivals. False at first.
    """

    counting: bool

    def arrange(self, buckets: list[int]) -> None:
        """``buckets``: for each tensor the number of its bucket. Nothing has arrived."""

    def __contains__(self, tensor: int) -> bool: ...
    def add(self, tensor: int) -> bool:
        """A tensor that has not arrived yet does so now. Returns whether its bucket is complete."""

    def count(self, bucket: int) -> int:
        """How many of a bucket's tensors have arrived."""

    def clear(self, bucket: int) -> None:
        """None of a bucket's tensors has arrived."""

    def hook(
        self, index: int, parameter: torch.Tensor, otherwise: Callable[[int, torch.Tensor], None]
    ) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """For the front of a parameter's accumulator: adds tensor ``index``, if nothing else is to be done.

        Else, that is unless ``counting``, the tensor has not arrived, is not the last one of its bucket to do so, and
        ``parameter.grad`` is None, it calls ``otherwise(index, parameter)``. It does nothing where there is no gradient
        to accumulate.
        """

def mark_gradients(parameters: list[torch.Tensor], name: str, mark: object) -> list[torch.Tensor]:
    """Set attribute ``name`` of all gradients to ``mark``. Returns the parameters of those that had another value.

    These keep it. A parameter whose ``grad`` is None is passed over.
    """

class TensorReader:
    """Reads what tensors are without a call of Python for each (csrc/tensor_reader.h).

    ``exchange``: the capsule that torch.Tensor has as ``__dlpack_c_exchange_api__``.
    """

    def __init__(self, exchange: object) -> None: ...
    def fit(self, tensors: list[torch.Tensor | None], dtype: int, shapes: npt.NDArray[np.int64]) -> bool:
        """Whether all are there, dense, on CPU, and of this dtype and their shapes.

        ``shapes``: of each tensor its number of dimensions and their extents, one tensor behind the other.
        """

    def find(
        self,
        tensors: list[torch.Tensor | None],
        dtype: int,
        counts: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.int64],
    ) -> bool:
        """Write the tensors' addresses. False, if any is missing, not contiguous, empty, or otherwise not as said."""

class Chunk:
    """Products [classes, batch] between rows and features (csrc/margin_softmax.h).

    Here and below, memory is contiguous and given by its address, 0 for none; its dtype by its code.
    """

    def __init__(
        self, products: int, dtype: int, classes: int, batch: int, inverse_norms: int, bias: int, scale: float
    ) -> None: ...

class OwnSamples:
    """Samples whose own class is in the chunk, in ascending order of it."""

    def __init__(self, count: int, classes: int, samples: int, values: int) -> None: ...

def add_exponentials(
    chunk: Chunk, own: OwnSamples, weights: int, maximum: int, total: int, rescale: int, threads: int
) -> None: ...
def to_probabilities(
    chunk: Chunk,
    own: OwnSamples,
    probabilities: int,
    maximum: int,
    log_total: int,
    counts: int,
    sums: int,
    threads: int,
) -> None: ...

class Rows:
    """``count`` rows of a head: from ``first`` on, or those that ``indices`` names (csrc/row_update.h)."""

    def __init__(
        self, weight: int, dtype: int, width: int, count: int, indices: int, first: int, inverse_norms: int
    ) -> None: ...

class Gradient:
    def __init__(self, values: int, dtype: int, factor: float) -> None: ...

class State:
    def __init__(self, values: int, dtype: int) -> None: ...

class Rounding:
    def __init__(self, stochastic: bool, seed: int) -> None: ...

class Sgd:
    def __init__(self, rate: float, momentum: float, decay: float, nesterov: bool) -> None: ...

class AdamW:
    def __init__(self, rate: float, first: float, second: float, epsilon: float, decay: float) -> None: ...

class Adagrad:
    def __init__(self, rate: float, epsilon: float, decay: float) -> None: ...

def load_rows(rows: Rows, target: int, dtype: int, threads: int) -> None: ...
def measure_rows(rows: Rows, threads: int) -> None: ...
def project_gradient(rows: Rows, gradient: Gradient, target: int, threads: int) -> None: ...
def step_sgd(
    rows: Rows, gradient: Gradient, momentum: State, policy: Sgd, rounding: Rounding, threads: int
) -> None: ...
def step_adamw(
    rows: Rows,
    gradient: Gradient,
    first: State,
    second: State,
    steps: int,
    policy: AdamW,
    rounding: Rounding,
    threads: int,
) -> None: ...
def step_adagrad(
    rows: Rows, gradient: Gradient, sums: int, policy: Adagrad, rounding: Rounding, threads: int
) -> None: ...
def advance_rows(rows: Rows, momentum: State, matrices: int, rounding: Rounding, threads: int) -> None: ...
def draw_normal_rows(
    classes: int, count: int, width: int, seed: int, deviation: float, dtype: int, rows: int, threads: int
) -> None:
    """Initial ``rows`` of ``classes`` (csrc/initial.h)."""

def draw_with(kept: int, kept_count: int, size: int, count: int, seed: int, result: int) -> None:
    """``count`` numbers below ``size`` beside those kept, all ascending, in ``result`` (csrc/sample.h)."""

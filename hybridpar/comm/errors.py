"""What the network did, and what a tensor held: the two errors that are not the caller's mistake."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective failed or timed out.

    Attributes:
        reason: what went wrong.
        rank: the rank on which the error was raised.
        operation: name of the collective, for example ``"all_reduce"``.
        tensor: what was being sent: a name, or a dtype and shape.
    """

    def __init__(self, reason: str, *, rank: int, operation: str, tensor: str) -> None:
        super().__init__(f"rank {rank}: {operation} of {tensor} failed: {reason}")
        self.reason = reason
        self.rank = rank
        self.operation = operation
        self.tensor = tensor


class NonFiniteError(ArithmeticError):
    """A tensor holds NaN or Inf. Raised on every rank at the same step, so that all of them can skip it together.

    Attributes:
        tensor: name of the first tensor found, for example ``"features"``.
        ranks: the ranks on which it was found.
        detail: how many values, and where.
    """

    def __init__(self, tensor: str, ranks: tuple[int, ...], detail: str) -> None:
        super().__init__(
            f"{tensor} must be finite; found NaN or Inf on rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks))} ({detail}). Skip the step (every rank gets this error), "
            "lower the learning rate, or compute in bfloat16 or float32 instead of float16"
        )
        self.tensor = tensor
        self.ranks = ranks
        self.detail = detail

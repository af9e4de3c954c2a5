"""What of a gradient travels, and in which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Wire:
    """How float32 and float64 gradients travel. ``Wire()`` sends every gradient whole and in its own dtype.

    Half-precision gradients always travel in their own dtype.

    Attributes:
        dtype: torch.bfloat16 or torch.float16: gradients are divided by the number of ranks and rounded to it, so that
            their sum cannot overflow. None: each in its own dtype.
        error_feedback: what rounding took from a gradient is added to the next one of the same tensor (Seide et al.
            2014), so that nothing is lost for good. Costs eight bytes a value of float32.
        top_k: of each tensor only this fraction of its values, the largest, travels; the rest is added to the next
            gradient (Lin et al. 2018), so error feedback is always on. None: all values.
    """

    dtype: torch.dtype | None = None
    error_feedback: bool = False
    top_k: float | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _HALVES.values():
            raise ValueError(
                f"Wire.dtype: expected torch.bfloat16, torch.float16 or None, got {self.dtype}; "
                "None sends each gradient in its own dtype"
            )
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"Wire.error_feedback: expected True or False, got {self.error_feedback!r}")
        if self.top_k is not None and (isinstance(self.top_k, bool) or not isinstance(self.top_k, int | float)):
            raise TypeError(f"Wire.top_k: expected a fraction or None, got {self.top_k!r}")
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise ValueError(
                f"Wire.top_k: expected a fraction above 0 and up to 1, got {self.top_k}; 0.01 sends 1 % of the values"
            )
        if self.error_feedback and self.dtype is None and self.top_k is None:
            raise ValueError(
                "Wire.error_feedback: expected a half dtype or top_k with it, got neither, so nothing is ever left "
                "out; set dtype=torch.bfloat16, or error_feedback=False"
            )

    @property
    def keeps_residuals(self) -> bool:
        """Whether something is left for the next step."""
        return self.error_feedback or self.top_k is not None

    @property
    def has_exponents_to_spare(self) -> bool:
        """Whether ``Plan.compress_exponents`` makes it shorter."""
        return self.dtype is not torch.float16 and self.top_k is None

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of dtype ``gradient`` travels."""
        return self.dtype if self.dtype is not None and gradient.itemsize >= 4 else gradient

    def describe(self) -> str:
        """In words, for a log line."""
        name = "own dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        part = "" if self.top_k is None else f", the largest {100 * self.top_k:g} % of the values"
        return f"{name}{part}{', error feedback' if self.keeps_residuals else ''}"

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON can carry them."""
        name = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {"dtype": name, "error_feedback": self.error_feedback, "top_k": self.top_k}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wire:
        """The inverse of ``to_json``.

        Raises:
            ValueError: a field has an unknown name or a value that it cannot have.
        """
        name = value.get("dtype")
        if name is not None and name not in _HALVES:
            raise ValueError(f"Wire.dtype: expected one of {sorted(_HALVES)} or null, got {name!r}")
        if unknown := value.keys() - {"dtype", "error_feedback", "top_k"}:
            raise ValueError(f"Wire: expected dtype, error_feedback and top_k, got also {sorted(unknown)}")
        return cls(**{**value, "dtype": None if name is None else _HALVES[name]})

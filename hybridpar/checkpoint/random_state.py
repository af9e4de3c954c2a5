"""States of the random generators of one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """States of this process's generators: torch (CPU and CUDA), NumPy's global one, Python's."""
    version, python_words, _ = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *python_words]),
        "numpy": torch.tensor([int(numpy_state["state"]["pos"]), *map(int, numpy_state["state"]["key"])]),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """The inverse of ``random_states``."""
    torch.set_rng_state(states["torch"])
    version, *python_words = states["python"].tolist()
    random.setstate((version, tuple(python_words), None))
    position, *key = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

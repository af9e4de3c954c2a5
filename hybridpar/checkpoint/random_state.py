"""States of the random generators of one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """States of this process's generators: torch (CPU and CUDA), NumPy's global one, Python's."""
    version, python_words, python_normal = random.getstate()
    numpy_state = _numpy_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *python_words]),
        "numpy": torch.tensor([int(numpy_state["state"]["pos"]), *map(int, numpy_state["state"]["key"])]),
        # Normal deviates come in pairs, of which one may wait for the next call: [is there one, its value], for each.
        "normals": torch.tensor(
            [
                [python_normal is not None, python_normal or 0.0],
                [numpy_state["has_gauss"], numpy_state["gauss"]],
            ],
            dtype=torch.float64,
        ),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """The inverse of ``random_states``."""
    torch.set_rng_state(states["torch"])
    (has_python, python_normal), (has_numpy, numpy_normal) = states["normals"].tolist()
    version, *python_words = states["python"].tolist()
    random.setstate((version, tuple(python_words), python_normal if has_python else None))
    position, *words = states["numpy"].tolist()
    key: npt.NDArray[np.uint32] = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, int(has_numpy), numpy_normal))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _numpy_state() -> dict[str, Any]:
    # The global generator is what scripts draw from, recommended or not.
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(state, dict)
    return state

"""The MXNet face: a store for MXNet's own scripts, on the engine.

MXNet 1.9.1 looks up ``numpy.bool`` when it is imported, which NumPy has not had since 1.24: the alias is put back here,
so import ``hybridpar.mxnet`` before ``mxnet``.

A process that ps-lite's launcher started as a scheduler or server ends here, without a complaint: there is nothing for
it to do, and MXNet itself, once imported, would wait in it for workers that never come.
"""

from __future__ import annotations

import sys

import numpy as np

from hybridpar.topology import ps_lite_role

if ps_lite_role() in ("scheduler", "server"):
    sys.exit(0)
if "bool" not in vars(np):
    np.bool = bool  # type: ignore[attr-defined]

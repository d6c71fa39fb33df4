"""causal_conv1d's compiled functions, which write into what the package's Python allocates.

Source: https://github.com/Dao-AILab/causal-conv1d, 1.7.0: ``csrc/causal_conv1d.cpp``. Its
deterministic mode takes a workspace in backward, which is not counted.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.stand_ins import register_stand_in

CUDA.python_kernels["DaoAILab"] = contextlib.nullcontext


def _write(*_arguments: Any) -> None:
    pass


_NAMES = ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update")
register_stand_in("causal_conv1d_cuda", dict.fromkeys(_NAMES, _write))

"""Functional collectives, which DTensor runs."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.registry import ANY

# A build without torch.distributed has none.
_wait = getattr(torch.ops._c10d_functional, "wait_tensor", None)


@ANY.kernel(*(() if _wait is None else (_wait.default,)))
def _wait_tensor(tensor: Tensor) -> Tensor:
    """torch/csrc/distributed/c10d/Functional.cpp, ``wait_tensor``: the tensor itself.

    Its fake kernel (torch/distributed/_functional_collectives.py) makes another.
    """
    return tensor

"""Backward kernels that make the gradients which autograd asks for, and no others.

PyTorch's fake kernels of these operators make all of them, whatever the mask says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.lowering.functions import CPU

_native_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default


@CPU.kernel(_native_batch_norm_backward)
def batch_norm_backward(*args: Any) -> tuple[Tensor | None, ...]:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_backward_cpu_template``."""
    gradients = _native_batch_norm_backward(*args)
    return tuple(x if wanted else None for x, wanted in zip(gradients, args[9], strict=True))

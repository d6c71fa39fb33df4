"""Backward operators that leave out gradients which nobody wants.

PyTorch's fake kernels make an unwanted gradient's tensor all the same for the operators here; for
the others with an ``output_mask`` (convolution, layer norm, group norm) they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cpu.target import CPU


@CPU.kernel(torch.ops.aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_backward_cpu_template``.

    Not PyTorch's fake kernel without the unwanted: that one decomposes into some thirty operators.
    """
    dtype = x.dtype if weight is None else weight.dtype
    channels = x.shape[1]
    return (
        torch.empty_like(x, memory_format=suggest_memory_format(x)) if output_mask[0] else None,
        x.new_empty(channels, dtype=dtype) if output_mask[1] else None,
        x.new_empty(channels, dtype=dtype) if output_mask[2] else None,
    )

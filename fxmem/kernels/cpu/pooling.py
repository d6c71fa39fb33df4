"""Max pooling in one dimension, whose CPU kernel finds no indices where none are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.cpu.target import CPU

Sizes = int | tuple[int, ...]


@CPU.function(torch.max_pool1d)
def max_pool1d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """aten/src/ATen/native/MaxPooling.cpp, ``max_pool1d``: one output and nothing else."""
    if (input.requires_grad and torch.is_grad_enabled()) or input.is_quantized:
        return torch.max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode)
    with torch._C._DisableTorchDispatch():  # shapes alone, which nobody needs to see
        shaped = torch.max_pool1d(
            torch.empty(input.shape, device="meta"),
            kernel_size, stride, padding, dilation, ceil_mode,
        )  # fmt: skip
    return input.new_empty(shaped.shape)

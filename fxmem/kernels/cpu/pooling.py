"""Max pooling in one dimension, whose CPU kernel finds no indices where none are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.registry import CPU
from fxmem.kernels.workspace import RESULT, copy_operands

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


# -- Contiguous copies --


# cpu/MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp, ``cpu_...``: the input in the
# format that its strides suggest, in backward all in that of the gradient.
CPU.workspace(
    "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"
)(copy_operands(0, like=0))
CPU.workspace("avg_pool2d_backward", "_adaptive_avg_pool2d_backward")(
    copy_operands(0, RESULT, like=0)
)
CPU.workspace("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")(
    copy_operands(0, RESULT, -1, like=0)
)
# aten/src/ATen/native/AveragePool3d.cpp, AdaptiveMaxPooling3d.cpp, FractionalMaxPool2d.cpp and the
# like.
CPU.workspace(
    "avg_pool3d", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "_adaptive_avg_pool3d_backward", "avg_pool3d_backward",
    "grid_sampler_2d_backward",
)(copy_operands(0))  # fmt: skip

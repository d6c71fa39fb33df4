"""Max pooling in one dimension, whose CPU kernel finds no indices where none are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.cpu.copying import copies_bytes
from fxmem.kernels.registry import CPU, OperatorCall, as_tensor
from fxmem.kernels.workspace import dense_bytes

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


@CPU.workspace(
    "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"
)
def _contiguous(call: OperatorCall) -> int:
    """cpu/MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp, ``cpu_...``.

    The input is made contiguous in the format that its strides suggest.
    """
    return copies_bytes(call.tensor(0), call.tensor(0))


@CPU.workspace("avg_pool2d_backward", "_adaptive_avg_pool2d_backward")
def _backward(call: OperatorCall) -> int:
    """The same files, ``..._backward``.

    Both gradients are taken contiguous in the format that the incoming one's strides suggest.
    """
    grad = call.tensor(0)
    return copies_bytes(grad, grad, call.result)


@CPU.workspace(
    "avg_pool3d", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "_adaptive_avg_pool3d_backward", "avg_pool3d_backward",
    "grid_sampler_2d_backward",
)  # fmt: skip
def _dense_operand(call: OperatorCall) -> int:
    """aten/src/ATen/native/AveragePool3d.cpp, AdaptiveMaxPooling3d.cpp, FractionalMaxPool2d.cpp
    and the like: a contiguous input or gradient."""
    return dense_bytes(call.tensor(0))


@CPU.workspace("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(call: OperatorCall) -> int:
    """cpu/MaxPoolKernel.cpp, ``max_pool..._backward_kernel_impl``: also the indices."""
    grad, indices = call.tensor(0), call.args[7] if len(call.args) > 7 else call.kwargs["indices"]
    return copies_bytes(grad, grad, call.result, as_tensor(indices))

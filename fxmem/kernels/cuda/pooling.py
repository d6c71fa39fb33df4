"""Pooling on CUDA: operands in the format that the input suggests, or in planes.

Source: ``aten/src/ATen/native/cuda/DilatedMaxPool2d.cu``, ``DilatedMaxPool3d.cu``,
``AveragePool2d.cu``, ``AveragePool3d.cu``, ``AdaptiveAveragePooling.cu``,
``AdaptiveAveragePooling3d.cu``, ``AdaptiveMaxPooling2d.cu``, ``AdaptiveMaxPooling3d.cu`` and
``MaxUnpooling.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.cuda.layouts import suggest_format
from fxmem.kernels.registry import OperatorCall, as_tensor
from fxmem.kernels.workspace import dense_bytes


def _suggested_bytes(model: Tensor, *operands: Tensor) -> int:
    """Copies of operands that are not dense in the format that the model suggests."""
    return sum(dense_bytes(x, suggest_format(model)) for x in operands)


def _list_results(outputs: object) -> list[Tensor]:
    found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [as_tensor(x) for x in found]


@CUDA.workspace("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d")
def _pool(call: OperatorCall) -> int:
    """``max_pool2d_with_indices_out_cuda`` and the like."""
    return _suggested_bytes(call.tensor(0), call.tensor(0))


@CUDA.workspace("avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d")
def _pool_planes(call: OperatorCall) -> int:
    """``avg_pool3d_out_cuda`` and the like: a contiguous input."""
    return dense_bytes(call.tensor(0))


@CUDA.workspace("_adaptive_avg_pool2d")
def _adaptive_average(call: OperatorCall) -> int:
    """``adaptive_avg_pool2d_out_cuda_template``: channels last are read with their strides."""
    x = call.tensor(0)
    return dense_bytes(x) if suggest_format(x) == torch.contiguous_format and x.dim() == 4 else 0


@CUDA.workspace("adaptive_max_pool2d")
def _adaptive_maximum(call: OperatorCall) -> int:
    """``adaptive_max_pool2d_out_cuda``: all in planes, results that are not by a copy."""
    return sum(dense_bytes(x) for x in (call.tensor(0), *_list_results(call.outputs)))


@CUDA.workspace("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_backward(call: OperatorCall) -> int:
    """``max_pool2d_with_indices_backward_out_cuda``: gradient, input and indices alike."""
    grad, x, indices = call.tensor(0), call.tensor(1), call.tensor(-1)
    operands = (grad, x, indices) if x.dim() < 5 else (grad, indices)
    return _suggested_bytes(x, *operands)


@CUDA.workspace("avg_pool2d_backward")
def _average_backward(call: OperatorCall) -> int:
    """``avg_pool2d_backward_out_cuda``."""
    grad, x = call.tensor(0), call.tensor(1)
    return _suggested_bytes(x, grad, x)


@CUDA.workspace(
    "avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d_backward"
)
def _backward_planes(call: OperatorCall) -> int:
    """``avg_pool3d_backward_out_cuda`` and the like: a contiguous gradient."""
    return dense_bytes(call.tensor(0))


@CUDA.workspace("_adaptive_avg_pool2d_backward")
def _adaptive_average_backward(call: OperatorCall) -> int:
    """``adaptive_avg_pool2d_backward_out_cuda_template``."""
    grad, x = call.tensor(0), call.tensor(1)
    return dense_bytes(grad) if suggest_format(x) == torch.contiguous_format else 0


@CUDA.workspace("adaptive_max_pool2d_backward")
def _adaptive_maximum_backward(call: OperatorCall) -> int:
    """``adaptive_max_pool2d_backward_out_cuda``: all in planes, the result by a copy."""
    operands = (call.tensor(0), call.tensor(2), *_list_results(call.outputs))
    return sum(dense_bytes(x) for x in operands)


@CUDA.workspace("max_unpool2d", "max_unpool3d")
def _unpool(call: OperatorCall) -> int:
    """``max_unpooling2d_forward_out_cuda``: contiguous operands."""
    return dense_bytes(call.tensor(0)) + dense_bytes(call.tensor(1))

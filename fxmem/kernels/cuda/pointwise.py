"""Elementwise operators, distances and draws on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.registry import OperatorCall, as_tensor
from fxmem.kernels.workspace import BlockTrace, dense_bytes, size_bytes

_CHUNK = 65536


@CUDA.kernel("log_sigmoid_forward")
def log_sigmoid_forward(input: Tensor) -> Any:
    """aten/src/ATen/native/cuda/Activation.cpp, ``log_sigmoid_forward_cuda``: no buffer."""
    if not is_on_gpu(input):
        return NotImplemented
    return torch.empty_like(input), input.new_empty(0)


@CUDA.workspace("_cdist_backward")
def _cdist_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, ``cdist_backward_kernel_impl``.

    The contributions of all pairs are added up afterwards.
    """
    first, distances = call.tensor(1), call.tensor(4)
    return distances.numel() * first.shape[-1] * first.element_size()


@CUDA.workspace("_foreach_norm.Scalar")
def _foreach_norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu, ``foreach_tensor_norm_cuda``.

    A sum for each chunk, as many for each tensor as the largest one has.
    """
    tensors = call.args[0]
    most = max((-(-as_tensor(x).numel() // _CHUNK) for x in tensors), default=0)
    return len(tensors) * most * max(4, as_tensor(tensors[0]).element_size()) if tensors else 0


# -- Dropout --


@CUDA.function(torch.dropout)
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """aten/src/ATen/native/Dropout.cpp, ``dropout``, ``is_fused_kernel_acceptable``.

    There is no such kernel in place, nor for whole channels.
    """
    if not (is_on_gpu(input) and train and 0 < p < 1 and input.numel() > 0):
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


@CUDA.workspace("native_dropout")
def _native_dropout(call: OperatorCall) -> Blocks:
    """cuda/Dropout.cu, ``dropout_cuda``: the mask comes first."""
    trace = BlockTrace()
    trace.allocate_result(1)
    trace.allocate_result(0)
    return trace.finish()


# -- Rearranging --


@CUDA.workspace("roll")
def _roll(call: OperatorCall) -> int:
    """aten/src/ATen/native/cuda/TensorTransformations.cu, ``roll_cuda``.

    One dimension after the other, each intermediate held; a contiguous input.
    """
    x, dims = call.tensor(0), call.get(2, "dims")
    count = len(dims) if isinstance(dims, (list, tuple)) else 0
    return max((count - 1) * size_bytes(x), dense_bytes(x))


# -- Draws of distributions, for which PyTorch has no fakes --


@CUDA.kernel("_sample_dirichlet", "_dirichlet_grad", "binomial")
def draw(parameters: Tensor, *_rest: Any) -> Tensor:
    """aten/src/ATen/native/cuda/Distributions.cpp: a result like the first argument."""
    return torch.empty_like(parameters, memory_format=torch.contiguous_format)


@CUDA.workspace("_sample_dirichlet")
def _sample_dirichlet(call: OperatorCall) -> int:
    """``_s_dirichlet_cuda``: the sum of each row."""
    concentration = call.tensor(0)
    return size_bytes(concentration.select(-1, 0))

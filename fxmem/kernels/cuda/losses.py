"""Losses on CUDA: reductions, softmax, and operands that are made dense.

Source: ``aten/src/ATen/native/cuda/Loss.cu``, ``NLLLoss2d.cu``, ``LossCTC.cu`` and ``SoftMax.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for

from fxmem.kernels.autocast.policies import follow_autocast
from fxmem.kernels.common.losses import register_losses
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.cuda.reduction.reductions import Layout, add, reduce_bytes
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import broadcast_sizes, copy_operands, dense_bytes, size_bytes
from fxmem.versions.operators import aten

# ``Reduction`` (aten/src/ATen/core/Reduction.h).
_NONE = 0
_INDEX_BYTES = 8


@CUDA.kernel("_ctc_loss.Tensor")
def ctc_loss(log_probs: Tensor, targets: Tensor, *_rest: Any) -> Any:
    """cuda/LossCTC.cu, ``ctc_loss_tensor``: the longest of padded targets fills its row."""
    if targets.dim() != 2:
        return NotImplemented
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * targets.shape[1] + 1)


@CUDA.kernel("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    """cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _reduce_bytes(x: Tensor, target: Tensor, averages: bool) -> int:
    sizes = broadcast_sizes(x, target)
    losses = Layout(sizes, make_contiguous_strides_for(sizes), 0, x.dtype)
    return reduce_bytes(losses, None, False, x.dtype, add)


register_losses(CUDA, _reduce_bytes, _reduce_bytes)


def _is_reduced(call: OperatorCall, index: int) -> bool:
    found = call.get(index, "reduction")
    return found is None or found != _NONE


@CUDA.workspace("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: OperatorCall) -> int:
    """cuda/Loss.cu, ``nll_loss_forward_out_cuda_template``; cuda/NLLLoss2d.cu: dense operands.

    Losses that are not reduced are read where they are; but for the weight of the classes.
    """
    weight = call.args[2] if isinstance(call.args[2], Tensor) else None
    weight_bytes = 0 if weight is None else dense_bytes(weight)
    if not _is_reduced(call, 3):
        return weight_bytes
    return weight_bytes + dense_bytes(call.tensor(0)) + dense_bytes(call.tensor(1))


@CUDA.workspace("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(call: OperatorCall) -> int:
    """cuda/Loss.cu, ``nll_loss_backward_out_cuda_template``: dense operands."""
    weight = call.args[3] if isinstance(call.args[3], Tensor) else None
    weight_bytes = 0 if weight is None else dense_bytes(weight)
    return weight_bytes + (dense_bytes(call.tensor(2)) if _is_reduced(call, 4) else 0)


@CUDA.workspace("_ctc_loss", "_ctc_loss.Tensor")
def _ctc(call: OperatorCall) -> int:
    """cuda/LossCTC.cu, ``ctc_loss_gpu_template``: lengths and offsets on the GPU."""
    return 3 * _INDEX_BYTES * call.tensor(0).shape[1]


@CUDA.workspace("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_backward(call: OperatorCall) -> int:
    """cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``: the other sums.

    Where infinite losses count nothing, a mask by loss, a zero, and the gradient made anew.
    """
    log_probs, alpha = call.tensor(1), call.tensor(6)
    batch = log_probs.shape[1]
    total = size_bytes(alpha) + 3 * _INDEX_BYTES * batch
    if call.get(8, "zero_infinity") is True:
        total += size_bytes(log_probs) + batch + log_probs.element_size()
    return total


# -- Softmax --


def _register(function: Callable[..., Any], operator: OpOverload, fused: OpOverload) -> None:
    """aten/src/ATen/native/SoftMax.cpp, ``softmax``: the kernel casts float16, and no other."""

    @CUDA.function(function)
    @follow_autocast(operator)
    def run(input: Tensor, dim: int, dtype: torch.dtype | None = None, **named: Any) -> Any:
        if is_on_gpu(input) and input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)
        return function(input, dim, dtype=dtype, **named)


for _functions, _operator, _fused in (
    ((torch.softmax, Tensor.softmax, torch.special.softmax), aten.softmax.int, aten._softmax),
    (
        (torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
        aten.log_softmax.int,
        aten._log_softmax,
    ),
):
    for _function in _functions:
        _register(_function, _operator, _fused.default)


# aten/src/ATen/native/cuda/SoftMax.cu, ``host_softmax``, ``host_softmax_backward``.
CUDA.workspace("_softmax", "_log_softmax")(copy_operands(0))
CUDA.workspace("_log_softmax_backward_data")(copy_operands(0, 1))


@CUDA.workspace("_softmax_backward_data")
def _backward(call: OperatorCall) -> int:
    """SoftMax.cu, ``softmax_backward_cuda_out``: the gradient times the output, contiguous."""
    grad, output = call.tensor(0), call.tensor(1)
    strides = compute_elementwise_output_strides(grad, output)
    is_contiguous = strides == make_contiguous_strides_for(output.shape)
    products = 1 if is_contiguous else 2
    return products * size_bytes(output) + dense_bytes(output)

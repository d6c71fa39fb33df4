"""Losses on CUDA: the losses of all elements, beside or behind the scalar that they become.

Source: ``aten/src/ATen/native/Loss.cpp``, whose functions serve any device (some results are
scalars in a storage for all elements: :mod:`fxmem.kernels.cpu.losses`), and ``cuda/Loss.cu``,
``cuda/NLLLoss2d.cu``, ``cuda/MultiMarginLoss.cu``, ``cuda/MultiLabelMarginCriterion.cu`` and
``cuda/LossCTC.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu import losses as shared
from fxmem.kernels.cuda.layouts import dense_bytes
from fxmem.kernels.cuda.reduction import Layout, add, reduce_bytes
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.tape import broadcast_sizes, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
# ``Reduction`` (aten/src/ATen/core/Reduction.h).
_NONE, _MEAN = 0, 1
_INDEX_BYTES = 8

CUDA.kernel(_aten.mse_loss.default, _aten.smooth_l1_loss.default)(shared.pointwise_loss)
CUDA.kernel(_aten.binary_cross_entropy.default)(shared.binary_cross_entropy)
CUDA.kernel(_aten.soft_margin_loss.default)(shared.soft_margin_loss)
CUDA.kernel(_aten._ctc_loss.default)(shared.ctc_loss)


@CUDA.kernel(_aten._ctc_loss.Tensor)
def ctc_loss(log_probs: Tensor, targets: Tensor, *_rest: Any) -> Any:
    """cuda/LossCTC.cu, ``ctc_loss_tensor``: the longest of padded targets fills its row."""
    if targets.dim() != 2:
        return NotImplemented
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * targets.shape[1] + 1)


@CUDA.kernel(_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    """cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _reduce_bytes(x: Tensor, target: Tensor) -> int:
    """A sum, or a mean, of the losses of all elements."""
    sizes = broadcast_sizes(x, target)
    losses = Layout(sizes, make_contiguous_strides_for(sizes), 0, x.dtype)
    return reduce_bytes(losses, None, False, x.dtype, add)


def _elements_bytes(x: Tensor, target: Tensor) -> int:
    return math.prod(broadcast_sizes(x, target)) * x.element_size()


def _is_reduced(args: Arguments, kwargs: Mapping[str, object], index: int) -> bool:
    found = argument(args, kwargs, index, "reduction")
    return found is None or found != _NONE


@CUDA.workspace(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
def _pointwise(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``mse_loss_out``, ``huber_loss``: the losses, which are then reduced."""
    x, target = tensor(args[0]), tensor(args[1])
    if not _is_reduced(args, kwargs, 2):
        return 0
    return _elements_bytes(x, target) + _reduce_bytes(x, target)


@CUDA.workspace(_aten.binary_cross_entropy.default)
def _bce(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/Loss.cu, ``binary_cross_entropy_out_cuda``: the losses in the result's storage."""
    return _reduced_in_place_bytes(args, _is_reduced(args, kwargs, 3))


@CUDA.workspace(_aten.soft_margin_loss.default)
def _soft_margin(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``soft_margin_loss_out``: likewise."""
    return _reduced_in_place_bytes(args, _is_reduced(args, kwargs, 2))


def _reduced_in_place_bytes(args: Arguments, reduced: bool) -> int:
    x, target = tensor(args[0]), tensor(args[1])
    return x.element_size() + _reduce_bytes(x, target) if reduced else 0


@CUDA.workspace(_aten.soft_margin_loss_backward.default)
def _soft_margin_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``soft_margin_loss_backward_out``: -target, its product, the exponential."""
    x, target = tensor(args[1]), tensor(args[2])
    product = _elements_bytes(x, target)
    return max(size_bytes(target) + 2 * product - new_bytes(outputs), product)


@CUDA.workspace(_aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_with_logits``: the loss beside one of its terms.

    Weights of positive targets make a factor first, beside themselves less one.
    """
    x, target = tensor(args[0]), tensor(args[1])
    elements = _elements_bytes(x, target)
    total = 2 * elements - new_bytes(outputs)
    if _is_reduced(args, kwargs, 4):
        total = 2 * elements + _reduce_bytes(x, target)
    positive = argument(args, kwargs, 3, "pos_weight")
    if isinstance(positive, Tensor):
        total = max(total, 2 * elements + size_bytes(positive) - new_bytes(outputs))
    return total


@CUDA.workspace(_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def _nll_loss(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/Loss.cu, ``nll_loss_forward_out_cuda_template``; cuda/NLLLoss2d.cu: dense operands.

    Losses that are not reduced are read where they are; but for the weight of the classes.
    """
    weight = args[2] if isinstance(args[2], Tensor) else None
    weight_bytes = 0 if weight is None else dense_bytes(weight)
    if not _is_reduced(args, kwargs, 3):
        return weight_bytes
    return weight_bytes + dense_bytes(tensor(args[0])) + dense_bytes(tensor(args[1]))


@CUDA.workspace(_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)
def _nll_loss_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/Loss.cu, ``nll_loss_backward_out_cuda_template``: likewise."""
    weight = args[3] if isinstance(args[3], Tensor) else None
    weight_bytes = 0 if weight is None else dense_bytes(weight)
    return weight_bytes + (dense_bytes(tensor(args[2])) if _is_reduced(args, kwargs, 4) else 0)


@CUDA.workspace(_aten.multi_margin_loss.default)
def _multi_margin(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/MultiMarginLoss.cu, ``multi_margin_loss_cuda_out``: dense operands, losses by row."""
    weight, x = argument(args, kwargs, 4, "weight"), tensor(args[0])
    return _dense_bytes(x, args[1], weight) + _row_bytes(x, _is_reduced(args, kwargs, 5))


@CUDA.workspace(_aten.multi_margin_loss_backward.default)
def _multi_margin_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/MultiMarginLoss.cu, ``multi_margin_loss_cuda_backward_out``: dense operands."""
    return _dense_bytes(*args[:3], argument(args, kwargs, 5, "weight"))


@CUDA.workspace(_aten.multilabel_margin_loss_forward.default)
def _multilabel_margin(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/MultiLabelMarginCriterion.cu, ``multilabel_margin_loss_forward_out_cuda_template``."""
    x = tensor(args[0])
    return _dense_bytes(x, args[1]) + _row_bytes(x, _is_reduced(args, kwargs, 2))


@CUDA.workspace(_aten.multilabel_margin_loss_backward.default)
def _multilabel_margin_backward(
    args: Arguments, kwargs: Mapping[str, object], outputs: object
) -> int:
    """``multilabel_margin_loss_backward_cuda_out_template``: dense operands."""
    return _dense_bytes(*args[:3], argument(args, kwargs, 4, "is_target"))


def _dense_bytes(*operands: object) -> int:
    return sum(dense_bytes(x) for x in operands if isinstance(x, Tensor))


def _row_bytes(x: Tensor, reduced: bool) -> int:
    """The losses of rows, which are added up."""
    if not reduced or x.dim() < 2:
        return 0
    losses = Layout((x.shape[0],), (1,), 0, x.dtype)
    held = x.shape[0] * x.element_size()
    return held + reduce_bytes(losses, None, False, x.dtype, add)


@CUDA.function(torch.ctc_loss)
def reduced_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_impl``: lengths that are numbers, as a tensor.

    The mean divides by them; PyTorch fills that tensor, which a fake one cannot be.
    """
    operands = (log_probs, targets, input_lengths, target_lengths, blank)
    has_numbers = not isinstance(target_lengths, Tensor)
    if not (has_numbers and reduction == _MEAN and is_on_gpu(log_probs)):
        return torch.ctc_loss(*operands, reduction, zero_infinity)
    losses = torch.ctc_loss(*operands, _NONE, zero_infinity)
    lengths = losses.new_empty(len(target_lengths)).clamp_min(1)
    return (losses / lengths).mean()


@CUDA.workspace(_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
def _ctc(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/LossCTC.cu, ``ctc_loss_gpu_template``: lengths and offsets on the GPU."""
    return 3 * _INDEX_BYTES * tensor(args[0]).shape[1]


@CUDA.workspace(_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
def _ctc_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``: the other sums.

    Where infinite losses count nothing, a mask by loss, a zero, and the gradient made anew.
    """
    log_probs, alpha = tensor(args[1]), tensor(args[6])
    batch = log_probs.shape[1]
    total = size_bytes(alpha) + 3 * _INDEX_BYTES * batch
    if argument(args, kwargs, 8, "zero_infinity") is True:
        total += size_bytes(log_probs) + batch + log_probs.element_size()
    return total

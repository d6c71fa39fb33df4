"""Losses on the CPU: some keep a scalar in memory for all elements.

Source: ``aten/src/ATen/native/Loss.cpp``, ``mse_loss_out``, ``smooth_l1_loss_out``,
``soft_margin_loss_out`` and ``binary_cross_entropy_out_cpu``: the losses of the elements are
written into the output, which is then reduced in place and becomes a scalar, in a storage of full
size. PyTorch's fake kernels return a scalar of its own. The rest is what the kernels need inside
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.cpu.pointwise import cast_bytes
from fxmem.kernels.cpu.reduction import two_pass_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, broadcast_sizes, size_bytes

# ``Reduction`` (aten/src/ATen/core/Reduction.h).
_NONE, _MEAN = 0, 1


@CPU.kernel("mse_loss", "smooth_l1_loss")
def pointwise_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """The output of ``mse_loss`` and ``smooth_l1_loss``."""
    elements = x.new_empty(broadcast_sizes(x, target), dtype=torch.result_type(x, target))
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel("binary_cross_entropy")
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """The output of ``binary_cross_entropy``."""
    elements = torch.empty_like(x)
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel("_ctc_loss")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *_rest: Any,
) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_cpu_template``: sizes are in the arguments."""
    steps, batch, _ = log_probs.shape
    states = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, states)


def _pointwise_loss_bytes(call: OperatorCall, count: int) -> int:
    """Peak of an elementwise loss that is then reduced, beyond its scalar."""
    x, target = call.tensor(0), call.tensor(1)
    elements_bytes = _elements_bytes(x, target)
    scalar = cast_bytes((1,), x.dtype) if _reduction(call) == _MEAN else 0
    partial = two_pass_bytes(elements_bytes // x.element_size(), 1, x.element_size())
    return count * elements_bytes + max(scalar, partial)


def _elements_bytes(x: Tensor, target: Tensor) -> int:
    return math.prod(broadcast_sizes(x, target)) * x.element_size()


def _reduction(call: OperatorCall) -> int:
    found = call.get(2, "reduction")
    return found if isinstance(found, int) else _MEAN


@CPU.workspace("mse_loss", "smooth_l1_loss")
def _structured_loss(call: OperatorCall) -> int:
    """aten/src/ATen/native/Loss.cpp, ``mse_loss_out``: two tensors of the elements' losses.

    The iterator allocates its output at full size; the scalar is then written into it.
    """
    if _reduction(call) == _NONE:
        return 0
    return _pointwise_loss_bytes(call, 2) - call.result_bytes


@CPU.workspace("huber_loss")
def _huber(call: OperatorCall) -> int:
    """Loss.cpp, ``huber_loss``: the elements' losses, then ``apply_loss_reduction``."""
    if _reduction(call) == _NONE:
        return 0
    return _pointwise_loss_bytes(call, 1)


@CPU.workspace("binary_cross_entropy_with_logits")
def _bce_with_logits(call: OperatorCall) -> int:
    """Loss.cpp, ``binary_cross_entropy_with_logits``: the loss beside one of its terms.

    Weights of positive targets make the other term's factor first, beside themselves less one.
    """
    x, target = call.tensor(0), call.tensor(1)
    found = call.get(4, "reduction")
    elements = _elements_bytes(x, target)
    total = elements
    if found != _NONE:
        total = _pointwise_loss_bytes(OperatorCall((x, target, found), {}, call.outputs), 2)
    positive = call.get(3, "pos_weight")
    if isinstance(positive, Tensor):
        factor = 2 * elements + size_bytes(positive) + cast_bytes((1,), x.dtype)
        total = max(total, factor - call.result_bytes)
    return total


@CPU.workspace("binary_cross_entropy")
def _bce(call: OperatorCall) -> int:
    """Loss.cpp, ``binary_cross_entropy_out_cpu``: the mean is made beside and copied in."""
    return _reduced_in_place_bytes(call, call.get(3, "reduction"))


def _reduced_in_place_bytes(call: OperatorCall, found: object) -> int:
    x = call.tensor(0)
    if found == _NONE:
        return 0
    mean = found is None or found == _MEAN
    trace = PeakTrace()
    trace.allocate(_elements_bytes(x, call.tensor(1)))
    trace.allocate(
        cast_bytes((1,), x.dtype) if mean else two_pass_bytes(x.numel(), 1, x.element_size())
    )
    return trace.peak_bytes + x.element_size() - call.result_bytes


@CPU.workspace("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_backward_cpu_template``: the other sums."""
    return size_bytes(call.tensor(6))

"""Losses of any device: some keep a scalar in memory for all elements.

Source: ``aten/src/ATen/native/Loss.cpp``, ``mse_loss_out``, ``smooth_l1_loss_out`` and
``huber_loss``; ``binary_cross_entropy_out_cpu`` and cuda/Loss.cu: the losses of the elements are
written into the output, which is then reduced in place and becomes a scalar, in a storage of full
size. PyTorch's fake kernels return a scalar of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.registry import ANY, Backend, OperatorCall
from fxmem.kernels.workspace import broadcast_sizes, size_bytes

# ``Reduction`` (aten/src/ATen/core/Reduction.h).
_NONE, _MEAN = 0, 1

Reduce = Callable[[Tensor, Tensor, bool], int]
"""From operands and whether their losses are averaged, else added up, to the bytes inside."""


@ANY.kernel("mse_loss", "smooth_l1_loss")
def pointwise_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """The output of ``mse_loss`` and ``smooth_l1_loss``."""
    elements = x.new_empty(broadcast_sizes(x, target), dtype=torch.result_type(x, target))
    return elements if reduction == _NONE else elements.as_strided((), ())


@ANY.kernel("binary_cross_entropy")
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """The output of ``binary_cross_entropy``."""
    elements = torch.empty_like(x)
    return elements if reduction == _NONE else elements.as_strided((), ())


@ANY.kernel("_ctc_loss")
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


def register_losses(
    backend: Backend, reduce: Reduce, reduce_in_place: Reduce, number_bytes: int = 0
) -> None:
    """Registers the workspaces of losses that are reduced.

    Args:
        backend: Whose kernels they are.
        reduce: Bytes of a reduction, beside the losses and the result.
        reduce_in_place: The same where the result takes the place of the losses.
        number_bytes: Bytes of an integer that is added to a tensor, before it is cast.
    """

    def estimate_pointwise(call: OperatorCall) -> int:
        """Loss.cpp, ``mse_loss_out``, ``huber_loss``: the losses, which are then reduced."""
        x, target, reduction = call.tensor(0), call.tensor(1), _read_reduction(call, 2)
        if reduction == _NONE:
            return 0
        return _elements_bytes(x, target) + reduce(x, target, reduction == _MEAN)

    def estimate_bce(call: OperatorCall) -> int:
        x, target, reduction = call.tensor(0), call.tensor(1), _read_reduction(call, 3)
        if reduction == _NONE:
            return 0
        return x.element_size() + reduce_in_place(x, target, reduction == _MEAN)

    def estimate_logits(call: OperatorCall) -> int:
        """Loss.cpp, ``binary_cross_entropy_with_logits``: the loss beside one of its terms.

        Weights of positive targets make a factor first, beside themselves less one.
        """
        x, target, reduction = call.tensor(0), call.tensor(1), _read_reduction(call, 4)
        elements = _elements_bytes(x, target)
        total = 2 * elements - call.result_bytes
        if reduction != _NONE:
            total = 2 * elements + reduce(x, target, reduction == _MEAN)
        positive = call.get(3, "pos_weight")
        if isinstance(positive, Tensor):
            number = number_bytes + x.element_size() if number_bytes else 0
            factor = 2 * elements + size_bytes(positive) + number
            total = max(total, factor - call.result_bytes)
        return total

    backend.workspace("mse_loss", "smooth_l1_loss", "huber_loss")(estimate_pointwise)
    backend.workspace("binary_cross_entropy")(estimate_bce)
    backend.workspace("binary_cross_entropy_with_logits")(estimate_logits)


def _read_reduction(call: OperatorCall, index: int) -> int:
    found = call.get(index, "reduction")
    return found if isinstance(found, int) else _MEAN


def _elements_bytes(x: Tensor, target: Tensor) -> int:
    return math.prod(broadcast_sizes(x, target)) * x.element_size()

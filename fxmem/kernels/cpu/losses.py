"""Losses on the CPU: some keep a scalar in memory for all elements.

Source: ``aten/src/ATen/native/Loss.cpp``, ``mse_loss_out``, ``smooth_l1_loss_out``,
``soft_margin_loss_out`` and ``binary_cross_entropy_out_cpu``: the losses of the elements are
written into the output, which is then reduced in place and becomes a scalar, in a storage of full
size. PyTorch's fake kernels return a scalar of its own. The rest is what the kernels need inside
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.pointwise import cast_bytes
from fxmem.kernels.cpu.reduction import two_pass_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, broadcast_sizes, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
# ``Reduction`` (aten/src/ATen/core/Reduction.h).
_NONE, _MEAN = 0, 1


@CPU.kernel(_aten.mse_loss.default, _aten.smooth_l1_loss.default)
def pointwise_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """The output of ``mse_loss`` and ``smooth_l1_loss``."""
    elements = x.new_empty(broadcast_sizes(x, target), dtype=torch.result_type(x, target))
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel(_aten.binary_cross_entropy.default)
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """The output of ``binary_cross_entropy``."""
    elements = torch.empty_like(x)
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel(_aten.soft_margin_loss.default)
def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """The output of ``soft_margin_loss``."""
    elements = x.new_empty(broadcast_sizes(x, target), dtype=torch.result_type(x, target))
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel(_aten._ctc_loss.default)
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


def _pointwise_loss_bytes(args: Arguments, kwargs: Mapping[str, object], count: int) -> int:
    """Peak of an elementwise loss that is then reduced, beyond its scalar."""
    x, target = tensor(args[0]), tensor(args[1])
    elements_bytes = _elements_bytes(x, target)
    scalar = cast_bytes((1,), x.dtype) if _reduction(args, kwargs) == _MEAN else 0
    partial = two_pass_bytes(elements_bytes // x.element_size(), 1, x.element_size())
    return count * elements_bytes + max(scalar, partial)


def _elements_bytes(x: Tensor, target: Tensor) -> int:
    """Bytes of the losses of all elements, shapes broadcast."""
    return math.prod(broadcast_sizes(x, target)) * x.element_size()


def _reduction(args: Arguments, kwargs: Mapping[str, object]) -> int:
    found = argument(args, kwargs, 2, "reduction")
    return found if isinstance(found, int) else _MEAN


@CPU.workspace(_aten.mse_loss.default, _aten.smooth_l1_loss.default)
def _structured_loss(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Loss.cpp, ``mse_loss_out``: two tensors of the elements' losses.

    The iterator allocates its output at full size; the scalar is then written into it.
    """
    if _reduction(args, kwargs) == _NONE:
        return 0
    return _pointwise_loss_bytes(args, kwargs, 2) - new_bytes(outputs)


@CPU.workspace(_aten.huber_loss.default)
def _huber(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``huber_loss``: the elements' losses, then ``apply_loss_reduction``."""
    if _reduction(args, kwargs) == _NONE:
        return 0
    return _pointwise_loss_bytes(args, kwargs, 1)


@CPU.workspace(_aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_with_logits``: the loss beside one of its terms.

    Weights of positive targets make the other term's factor first, beside themselves less one.
    """
    x, target = tensor(args[0]), tensor(args[1])
    found, weight = args[4] if len(args) > 4 else kwargs.get("reduction"), args[3:4] or (None,)
    elements = _elements_bytes(x, target)
    total = elements if found == _NONE else _pointwise_loss_bytes((*args[:2], found), kwargs, 2)
    positive = kwargs.get("pos_weight", weight[0])
    if isinstance(positive, Tensor):
        factor = 2 * elements + size_bytes(positive) + cast_bytes((1,), x.dtype)
        total = max(total, factor - new_bytes(outputs))
    return total


@CPU.workspace(_aten.binary_cross_entropy_backward.default)
def _bce_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_backward_out_cpu``: the number of elements."""
    found = argument(args, kwargs, 4, "reduction")
    x = tensor(args[1])
    return cast_bytes((1,), x.dtype) if found in (None, _MEAN) else 0


@CPU.workspace(_aten.binary_cross_entropy.default)
def _bce(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_out_cpu``: the mean is made beside and copied in."""
    return _reduced_in_place_bytes(args, argument(args, kwargs, 3, "reduction"), outputs)


@CPU.workspace(_aten.soft_margin_loss.default)
def _soft_margin(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``soft_margin_loss_out``: likewise."""
    return _reduced_in_place_bytes(args, argument(args, kwargs, 2, "reduction"), outputs)


def _reduced_in_place_bytes(args: Arguments, found: object, outputs: object) -> int:
    x = tensor(args[0])
    if found == _NONE:
        return 0
    mean = found is None or found == _MEAN
    tape = Tape()
    tape.allocate(_elements_bytes(x, tensor(args[1])))
    tape.allocate(
        cast_bytes((1,), x.dtype) if mean else two_pass_bytes(x.numel(), 1, x.element_size())
    )
    return tape.peak_bytes + x.element_size() - new_bytes(outputs)


@CPU.workspace(_aten.soft_margin_loss_backward.default)
def _soft_margin_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``soft_margin_loss_backward_out``: the exponential beside its argument."""
    return 2 * _elements_bytes(tensor(args[1]), tensor(args[2]))


@CPU.workspace(_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
def _ctc_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_backward_cpu_template``: the other sums."""
    return size_bytes(tensor(args[6]))

"""Losses whose scalar lies in memory for all elements.

Source: ``aten/src/ATen/native/Loss.cpp``, ``mse_loss_out``, ``smooth_l1_loss_out`` and
``binary_cross_entropy_out_cpu``: the losses of the elements are written into the output, which is
then reduced in place and becomes a scalar, in a storage of full size. PyTorch's fake kernels return
a scalar of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.lowering.functions import CPU

_aten = torch.ops.aten
_NONE = 0
_MEAN = 1


@CPU.kernel(_aten.mse_loss.default, _aten.smooth_l1_loss.default)
def pointwise_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """The output of ``mse_loss`` and ``smooth_l1_loss``."""
    shape = torch.broadcast_shapes(x.shape, target.shape)  # type: ignore[no-untyped-call]
    elements = x.new_empty(shape, dtype=torch.result_type(x, target))
    return elements if reduction == _NONE else elements.as_strided((), ())


@CPU.kernel(_aten.binary_cross_entropy.default)
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """The output of ``binary_cross_entropy``."""
    elements = torch.empty_like(x)
    return elements if reduction == _NONE else elements.as_strided((), ())

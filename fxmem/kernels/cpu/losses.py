"""Reductions of losses on the CPU (:mod:`fxmem.kernels.common.losses`), and CTC."""

from __future__ import annotations

import math

from torch import Tensor

from fxmem.kernels.common.losses import register_losses
from fxmem.kernels.cpu.pointwise import cast_bytes
from fxmem.kernels.cpu.reduction import two_pass_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import broadcast_sizes, size_bytes


def _reduce_bytes(x: Tensor, target: Tensor, averages: bool) -> int:
    """Partial sums of threads; a mean's divisor is a tensor."""
    partial = two_pass_bytes(math.prod(broadcast_sizes(x, target)), 1, x.element_size())
    return max(partial, cast_bytes((1,), x.dtype) if averages else 0)


def _reduce_in_place_bytes(x: Tensor, target: Tensor, averages: bool) -> int:
    """Loss.cpp, ``binary_cross_entropy_out_cpu``: the mean is made beside and copied in."""
    return cast_bytes((1,), x.dtype) if averages else _reduce_bytes(x, target, averages)


register_losses(CPU, _reduce_bytes, _reduce_in_place_bytes, number_bytes=8)


@CPU.workspace("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_backward_cpu_template``: the other sums."""
    return size_bytes(call.tensor(6))

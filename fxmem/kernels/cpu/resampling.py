"""Resampling on the CPU: tables of indices and weights, and contiguous copies."""

from __future__ import annotations

import functools
import math

import torch
from torch._ops import OpOverload

from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import RESULT, copy_operands, dense_bytes
from fxmem.versions.operators import aten

# cpu/UpSampleKernel.cpp, ``_use_vectorized_kernel_cond_2d`` and ``..._3d``.
_SMALL_OUTPUT = 128
_MANY_CHANNELS = 3
_INDEX_BYTES, _FLOAT_BYTES = 8, 4


def _overloads(name: str) -> tuple[OpOverload, ...]:
    """An operator that takes sizes, and the one that takes sizes or scales."""
    packet = getattr(aten, name)
    return tuple(getattr(packet, kind) for kind in ("default", "vec") if kind in packet.overloads())


# cpu/UpSampleMoreKernel.cpp, ``..._backward_kernel_impl``: both gradients in the
# format that the strides of the incoming one suggest.
CPU.workspace(
    *(
        f"{name}_backward"
        for name in (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
            "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
            "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
        )
    )
)(copy_operands(0, RESULT, like=0))  # fmt: skip
# aten/src/ATen/native/UpSampleBicubic2d.cpp and the like.
CPU.workspace(
    "upsample_bicubic2d_backward", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward",
)(copy_operands(0))  # fmt: skip


def _upsample_bytes(call: OperatorCall, taps: int) -> int:
    """Tables of indices and weights by position, or ``cpu_upsample_linear_channels_last``.

    The latter serves contiguous inputs, too, where the result is small.
    """
    x, out = call.tensor(0), call.result
    if taps <= 2 and x.dim() > 3:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        small = x.dim() == 4 and out.shape[-2] + out.shape[-1] <= _SMALL_OUTPUT
        if small or (x.is_contiguous(memory_format=last) and x.shape[1] > _MANY_CHANNELS):
            return sum(dense_bytes(y, last) for y in (x, out))
    weight_bytes = x.element_size() if x.is_floating_point() else _FLOAT_BYTES
    return taps * (_INDEX_BYTES + weight_bytes) * sum(out.shape[2:])


@CPU.workspace(
    *(
        overload
        for dims in (1, 2, 3)
        for name in (f"upsample_nearest{dims}d", f"_upsample_nearest_exact{dims}d")
        for overload in _overloads(name)
    )
)
def _upsample_nearest(call: OperatorCall) -> int:
    """aten/src/ATen/native/cpu/UpSampleKernel.cpp, ``upsample_nearest2d_kernel_impl``."""
    return _upsample_bytes(call, 1)


@CPU.workspace(
    *_overloads("upsample_linear1d"),
    *_overloads("upsample_bilinear2d"),
    *_overloads("upsample_trilinear3d"),
)
def _upsample_linear(call: OperatorCall) -> int:
    """UpSampleKernel.cpp, ``upsample_bilinear2d_kernel_impl``: two neighbours by dimension."""
    return _upsample_bytes(call, 2)


@CPU.workspace(*_overloads("upsample_bicubic2d"))
def _upsample_bicubic(call: OperatorCall) -> int:
    """UpSampleKernel.cpp, ``upsample_bicubic2d_kernel_impl``: four neighbours by dimension."""
    return _upsample_bytes(call, 4)


def _antialias_bytes(call: OperatorCall, taps: int) -> int:
    """``separable_upsample_generic_Nd_kernel_impl``: dimension by dimension, the last one first.

    The result of one dimension is held while the next is made, with a table of each position's
    first pixel, count, stride, offset and weights (``compute_index_ranges_weights``).
    """
    x, out = call.tensor(0), call.result
    corners = call.get(2, "align_corners") is True
    sizes, held, peak = list(x.shape), 0, 0
    changed = [dim for dim in (3, 2) if x.shape[dim] != out.shape[dim]]
    for dim in changed:
        sizes[dim] = out.shape[dim]
        made = math.prod(sizes) * x.element_size() if dim is not changed[-1] else 0
        before, after = x.shape[dim], out.shape[dim]
        scale = before / after  # ``area_pixel_compute_scale``
        if corners:
            scale = (before - 1) / (after - 1) if after > 1 else 0.0
        weights = 2 * math.ceil(taps * 0.5 * max(1.0, scale)) + 1
        table = after * (4 * _INDEX_BYTES + weights * x.element_size())
        peak = max(peak, held + made + table)
        held = made
    return peak


for _name, _taps in (("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 4)):
    CPU.workspace(*_overloads(_name))(functools.partial(_antialias_bytes, taps=_taps))

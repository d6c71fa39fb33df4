"""Pooling and resampling on the CPU: contiguous copies and interpolation tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.lowering.cpu_registry import Arguments, tensor, workspace
from fxmem.lowering.cpu_tape import is_like_channels_last, size_bytes

_aten = torch.ops.aten

# cpu/UpSampleKernel.cpp, ``_use_vectorized_kernel_cond_2d``.
_SMALL_OUTPUT = 128
_MANY_CHANNELS = 3
_INDEX_BYTES = 8


def _copies_bytes(model: Tensor, *operands: Tensor) -> int:
    """Bytes of the operands' copies in the format that the model's strides suggest."""
    wanted = torch.contiguous_format
    if is_like_channels_last(model.shape, model.stride()):
        wanted = torch.channels_last if model.dim() == 4 else torch.channels_last_3d
    return sum(size_bytes(x) for x in operands if not x.is_contiguous(memory_format=wanted))


@workspace(
    _aten.max_pool2d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten._adaptive_avg_pool2d.default,
    _aten.adaptive_max_pool2d.default,
)
def _contiguous(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cpu/MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp, ``cpu_...``.

    The input is made contiguous in the format that its strides suggest.
    """
    return _copies_bytes(tensor(args[0]), tensor(args[0]))


@workspace(
    _aten.avg_pool2d_backward.default,
    _aten._adaptive_avg_pool2d_backward.default,
    _aten.upsample_bilinear2d_backward.default,
    _aten.upsample_nearest2d_backward.default,
)
def _backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """The same files and cpu/UpSampleMoreKernel.cpp, ``..._backward``.

    Both gradients are taken contiguous in the format that the incoming one's strides suggest.
    """
    grad = tensor(args[0])
    return _copies_bytes(grad, grad, tensor(outputs))


@workspace(_aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cpu/MaxPoolKernel.cpp, ``max_pool2d_backward_kernel_impl``: also the indices."""
    grad, indices = tensor(args[0]), args[7] if len(args) > 7 else kwargs["indices"]
    return _copies_bytes(grad, grad, tensor(outputs), tensor(indices))


@workspace(_aten.upsample_bicubic2d_backward.default)
def _bicubic_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/UpSampleBicubic2d.cpp: a contiguous gradient."""
    grad = tensor(args[0])
    return 0 if grad.is_contiguous() else size_bytes(grad)


def _is_vectorized(x: Tensor, out: Tensor) -> bool:
    """Whether the channels-last kernel serves, also for a contiguous input."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    small = out.shape[-2] + out.shape[-1] <= _SMALL_OUTPUT
    return (last and x.shape[1] > _MANY_CHANNELS) or small


def _upsample_bytes(args: Arguments, outputs: object, taps: int, weight_bytes: int) -> int:
    """``cpu_upsample_linear_channels_last``, or tables of indices and weights by position."""
    x, out = tensor(args[0]), tensor(outputs)
    if taps <= 2 and _is_vectorized(x, out):
        operands = (x, out)
        return sum(
            size_bytes(operand)
            for operand in operands
            if not operand.is_contiguous(memory_format=torch.channels_last)
        )
    return taps * (_INDEX_BYTES + weight_bytes) * (out.shape[-2] + out.shape[-1])


@workspace(_aten.upsample_nearest2d.default, _aten.upsample_nearest2d.vec)
def _upsample_nearest(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cpu/UpSampleKernel.cpp, ``upsample_nearest2d_kernel_impl``."""
    return _upsample_bytes(args, outputs, 1, max(4, tensor(args[0]).element_size()))


@workspace(_aten.upsample_bilinear2d.default, _aten.upsample_bilinear2d.vec)
def _upsample_bilinear(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """UpSampleKernel.cpp, ``upsample_bilinear2d_kernel_impl``: two neighbours by dimension."""
    return _upsample_bytes(args, outputs, 2, max(4, tensor(args[0]).element_size()))


@workspace(_aten.upsample_bicubic2d.default, _aten.upsample_bicubic2d.vec)
def _upsample_bicubic(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """UpSampleKernel.cpp, ``upsample_bicubic2d_kernel_impl``: four neighbours by dimension."""
    return _upsample_bytes(args, outputs, 4, max(4, tensor(args[0]).element_size()))

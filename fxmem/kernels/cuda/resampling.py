"""Resampling, padding and patches on CUDA: contiguous copies, and results that are contiguous.

Source: ``aten/src/ATen/native/cuda/UpSample*.cu``, ``ReflectionPad.cu``, ``ReplicationPadding.cu``,
``Im2Col.cu``, ``Col2Im.cu`` and ``PixelShuffle.cpp``. PyTorch's fake kernels give a tensor that
they take to be on a CPU the input's format.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import RESULT, copy_operands, dense_bytes
from fxmem.versions.operators import aten, find_operators

_LEAST_NEAREST = 4
_LEAST_BILINEAR = 16


_NEAREST_2D = find_operators(
    "upsample_nearest2d", "upsample_nearest2d.vec",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact2d.vec",
)  # fmt: skip
_BILINEAR = find_operators("upsample_bilinear2d", "upsample_bilinear2d.vec")


def _make_contiguous(func: OpOverload, least: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The result, contiguous unless the channels are as many as channels last takes."""
    if (
        not is_on_gpu(x)
        or suggest_memory_format(x) == torch.contiguous_format
        or x.shape[1] >= least
    ):
        return NotImplemented
    result = func(x, *args, **kwargs)
    return torch.empty_like(result, memory_format=torch.contiguous_format)


_NEVER = 1 << 62
for _operators, _least in (
    (_NEAREST_2D, _LEAST_NEAREST),
    (_BILINEAR, _LEAST_BILINEAR),
    (find_operators("pixel_shuffle", "pixel_unshuffle"), _NEVER),
    (
        find_operators(
            *(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (2, 3))
        ),
        _NEVER,
    ),
):
    for _operator in _operators:
        CUDA.kernel(_operator)(functools.partial(_make_contiguous, _operator, _least))


@CUDA.workspace(*_NEAREST_2D)
def _nearest(call: OperatorCall) -> int:
    """UpSampleNearest2d.cu, ``upsample_nearest2d_out_cuda_template``."""
    x, out = call.tensor(0), call.result
    if suggest_memory_format(x) == torch.channels_last and x.shape[1] >= _LEAST_NEAREST:
        return dense_bytes(x, torch.channels_last)
    return dense_bytes(x) + dense_bytes(out)


_IN_PLANES = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip


# UpSampleNearest3d.cu, UpSampleTrilinear3d.cu and the like: results that are not in planes are made
# by a copy.
CUDA.workspace(
    *_IN_PLANES, *(f"{name}.vec" for name in _IN_PLANES), "upsample_trilinear3d_backward"
)(copy_operands(0, RESULT))


@CUDA.workspace(*_BILINEAR)
def _bilinear(call: OperatorCall) -> int:
    """UpSampleBilinear2d.cu, ``upsample_bilinear2d_out_cuda_template``: planes by their strides."""
    x = call.tensor(0)
    if suggest_memory_format(x) != torch.channels_last or x.shape[1] < _LEAST_BILINEAR:
        return 0
    return dense_bytes(x, torch.channels_last)


@CUDA.workspace(
    "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward",
    "upsample_bilinear2d_backward",
)
def _backward_2d(call: OperatorCall) -> int:
    """UpSampleNearest2d.cu and UpSampleBilinear2d.cu, ``..._backward_out_cuda_template``."""
    grad, out = call.tensor(0), call.result
    last = torch.channels_last
    is_last = suggest_memory_format(grad) == last and grad.shape[1] >= _LEAST_NEAREST
    if is_last and out.is_contiguous(memory_format=last):
        return dense_bytes(grad, last)
    return dense_bytes(grad) + dense_bytes(out)


# ``upsample_linear1d_backward_out_cuda_template`` and the like.
CUDA.workspace(
    *(
        f"{name}_backward"
        for name in (
            "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d",
            "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_bicubic2d",
            "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
            "reflection_pad1d", "reflection_pad2d",
        )
    ),
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
)(copy_operands(0))  # fmt: skip

# Im2Col.cu and Col2Im.cu allocate as their counterparts for the CPU do.
for _operator in (aten.im2col.default, aten.col2im.default):
    CUDA.kernel(_operator)(CPU.kernels[_operator])
    CUDA.workspace(_operator)(CPU.estimators[_operator])

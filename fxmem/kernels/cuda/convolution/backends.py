"""Backends of CUDA's convolutions, and their memory formats.

Source: ``aten/src/ATen/native/Convolution.cpp`` (``ConvParams``, ``_select_conv_backend``) and
``ConvUtils.h``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cuda.layouts import fits_32_bits

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEW_CHANNELS = 32
_MAX_INDEX = 2**31 - 1


class ConvBackend(Enum):
    """The values of ``ConvBackend`` that serve CUDA."""

    CUDNN = "cuDNN"
    DEPTHWISE = "a kernel of PyTorch for one channel at a time"
    COLUMNS = "matrix products of columns, image by image"
    EMPTY = "nothing to compute"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of a convolution; a size for each spatial dimension.

    In one dimension PyTorch makes it two (``view1d_as_2d``).
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def is_dilated(self) -> bool:
        """``is_dilated``."""
        return any(step != 1 for step in self.dilation)

    @property
    def has_big_output_padding(self) -> bool:
        """``is_output_padding_big``."""
        return any(p >= s for p, s in zip(self.output_padding, self.stride, strict=True))


def suggest_common_format(first: Tensor, second: Tensor) -> torch.memory_format:
    """``cudnn_conv_suggest_memory_format``: channels last if one of the two is."""
    last = _LAST.get(second.dim())
    if last is None or torch.float64 in (first.dtype, second.dtype):
        return torch.contiguous_format
    found = (suggest_memory_format(first), suggest_memory_format(second))
    return last if last in found else torch.contiguous_format


def select_backend(x: Tensor, weight: Tensor, geometry: Geometry) -> ConvBackend:
    """``_select_conv_backend``, for tensors of four or five dimensions."""
    if 0 in x.shape[:2]:
        return ConvBackend.EMPTY
    groups = geometry.groups
    if not geometry.transposed and x.shape[1] == groups > 1 and weight.shape[0] % groups == 0:
        takes_cudnn = _takes_cudnn_depthwise(x, weight, geometry)
        return ConvBackend.CUDNN if takes_cudnn else ConvBackend.DEPTHWISE
    return ConvBackend.CUDNN if _takes_cudnn(x, weight, geometry) else ConvBackend.COLUMNS


def _takes_cudnn(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """``use_cudnn``: unless an image is too large to be split off, or padding too big."""
    if not torch.backends.cudnn.enabled or math.prod(x.shape[1:]) > _MAX_INDEX:
        return False
    return not geometry.has_big_output_padding


def _takes_cudnn_depthwise(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """``use_cudnn_depthwise``: in channels last; else in half precision, where it is faster."""
    if not torch.backends.cudnn.enabled:
        return False
    if not (fits_32_bits(x) and fits_32_bits(weight)):
        return True
    if suggest_common_format(x, weight) != torch.contiguous_format:
        return True
    stride = geometry.stride
    return (
        x.dtype == weight.dtype == torch.float16
        and x.dim() == 4
        and not geometry.is_dilated
        and (stride[0] == stride[1] or x.shape[2] == 1)
        and x.shape[1] >= _FEW_CHANNELS
        and _suits_cudnn(x, weight, stride[1])
    )


def _suits_cudnn(x: Tensor, weight: Tensor, stride: int) -> bool:
    """``check_cudnn_depthwise_workload_with_filter``: sizes at which cuDNN was faster."""
    batch, channels, height, width = x.shape
    side = weight.shape[3]
    if height == 1 and stride == 1:
        return True
    if weight.shape[2] != side or side not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if batch == 1:
        return side > 1 or width <= 28
    if side == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)

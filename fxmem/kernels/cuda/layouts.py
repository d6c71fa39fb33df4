"""Memory layouts of tensors, as CUDA's kernels ask for them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fxmem.kernels.workspace import size_bytes

_MAX_INDEX = 2**31 - 1


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """``toAccumulateType`` on CUDA (aten/src/ATen/AccumulateType.h)."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return torch.int64


def fits_32_bits(x: Tensor) -> bool:
    """``canUse32BitIndexMath`` (aten/src/ATen/native/CanUse32BitIndexMath.h), in elements."""
    if x.numel() == 0:
        return True
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return bool(x.numel() < _MAX_INDEX and last < _MAX_INDEX)


def reshape_bytes(x: Tensor, last: int) -> int:
    """Returns the bytes that ``reshape`` copies where it makes one of the last dimensions.

    Args:
        x: The tensor.
        last: How many dimensions become one.
    """
    first = x.dim() - last
    dims = zip(x.shape[first:], x.stride()[first:], strict=True)
    wide = [(n, s) for n, s in dims if n != 1]
    # ``computeStride``: dimensions that are one of evenly spaced elements.
    is_one = all(s == m * t for (_, s), (m, t) in itertools.pairwise(wide))
    return 0 if is_one or 0 in x.shape[first:] else size_bytes(x)

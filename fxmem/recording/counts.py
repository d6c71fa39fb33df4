"""Bounds of how many elements of a mask are true, where its values are not known.

Samplers of detectors set a few elements of zeros, by indices that are not known, join such masks
and look where they are true: torchvision's ``BalancedPositiveNegativeSampler``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes.values import find_known
from fxmem.versions.operators import aten

PUT = aten.index_put_.default
_MOST = "_fxmem_most"


def find_most(mask: Tensor) -> int:
    """Finds how many elements of a mask may be true."""
    known = find_known(mask)
    if known is not None:
        with _disable_current_modes():
            return int(known.real.count_nonzero())
    most: tuple[int, int] | None = mask.__dict__.get(_MOST)
    return most[0] if most and most[1] == _read_version(mask) else mask.numel()


def see_mask(func: Any, args: tuple[Any, ...], result: Any, before: int) -> None:
    """Bounds what an operator on masks makes.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
        before: How many elements of the first argument may have been true.
    """
    if func is PUT:
        target, indices = args[:2]
        if len(indices) == target.dim() and all(map(_is_index, indices)):
            count = prod(max(sizes) for sizes in zip(*_list_shapes(indices), strict=True))
            _keep_most(target, before + count, writes=1)
    elif func is aten.bitwise_or.Tensor and args[0].shape == args[1].shape:
        _keep_most(result, sum(map(find_most, args[:2])))
    elif func is aten.cat.default:
        _keep_most(result, sum(map(find_most, args[0])))
    elif func is aten._to_copy.default and _MOST in args[0].__dict__:
        _keep_most(result, find_most(args[0]))


def _keep_most(mask: Tensor, most: int, *, writes: int = 0) -> None:
    """Keeps a bound until the mask or a view is written to, but for writes that run."""
    mask.__dict__[_MOST] = min(mask.numel(), most), _read_version(mask) + writes


def _read_version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return -1 if tensor.is_inference() else tensor._version


def _is_index(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64


def _list_shapes(indices: Any) -> list[list[int]]:
    dims = max(index.dim() for index in indices)
    return [[1] * (dims - index.dim()) + list(index.shape) for index in indices]

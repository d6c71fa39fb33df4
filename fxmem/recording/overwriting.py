"""Which argument of an operator its result could be written over, as far as the tensors go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def find_overwritable(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Iterator[torch.Tensor]:
    """The arguments that an in-place variant could overwrite and give the same tensor.

    They have the result's shape, dtype and strides and all of their storage. Where autograd
    records, one that is a leaf cannot be changed, and one that is a view makes the backward
    copy (``CopySlices``). The second is named too, for operators in which it can take the
    place of the first.

    Args:
        args: What an operator was called with, before it runs or after.
        kwargs: Likewise.
        result: What it returned.

    >>> x = torch.zeros(2, 3)
    >>> [y is x for y in find_overwritable((x, torch.ones(3)), {}, x + 1)]
    [True]
    """
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    for tensor in args[:2] if kwargs.get("alpha", 1) == 1 else args[:1]:
        if not isinstance(tensor, torch.Tensor) or not _is_alike(tensor, result):
            continue
        if not (is_recorded and (tensor._is_view() or (tensor.is_leaf and tensor.requires_grad))):
            yield tensor


def _is_alike(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    return (
        tensor.shape == result.shape
        and tensor.dtype == result.dtype
        and tensor.device == result.device
        and tensor.layout is torch.strided
        and tensor.stride() == result.stride()
        and tensor.untyped_storage().nbytes() == result.untyped_storage().nbytes()
        and tensor.is_conj() == result.is_conj()
        and tensor.is_neg() == result.is_neg()
    )

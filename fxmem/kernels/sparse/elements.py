"""The elements of a sparse tensor: indices, whose values may be known, and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import find_parts


def are_contiguous(*tensors: Tensor) -> bool:
    """Whether the values of sparse tensors are."""
    return all(find_parts(tensor).values.is_contiguous() for tensor in tensors)


def check_exact(sparse: Tensor) -> bool:
    """True, where it is known how many elements there are.

    Raises:
        DataDependentOutputException: It is not.
    """
    if not find_parts(sparse).is_exact:
        raise DataDependentOutputException(torch.ops.aten._coalesce.default)
    return True


def alias(part: Tensor) -> Tensor:
    """The same memory."""
    return _hand_on_value(part, part.detach())


def copy(part: Tensor) -> Tensor:
    """Memory of its own."""
    return _hand_on_value(part, part.clone())


def attach_joined(joined: Tensor, first: Tensor, second: Tensor) -> None:
    """Gives indices that are two others, side by side, their values."""
    known = find_value(first), find_value(second)
    if known[0] is not None and known[1] is not None:
        with _disable_current_modes():
            attach_value(joined, torch.cat([known[0], known[1]], 1))


def _hand_on_value(part: Tensor, to: Tensor) -> Tensor:
    known = find_value(part)
    if known is not None:
        attach_value(to, known)
    return to

"""Gradients of bags of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.kernels.sparse.registry import BAG_BACKWARD, INDEX_BYTES, kernel, workspace
from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import Parts, make_sparse

_aten = torch.ops.aten
_MODE, _PADDING = 8, 11  # positions of arguments
_MEAN = 1


@kernel(BAG_BACKWARD)
def _bag_gradient(*args: Any, **_kwargs: Any) -> Tensor:
    """EmbeddingBag.cpp, ``_embedding_bag_sparse_backward``."""
    grad, indices = args[0], args[1]
    used, known = _find_used(args), find_value(indices)
    index = indices.view(1, -1) if used is None else indices.new_empty(1, used.numel())
    if known is not None:
        with _disable_current_modes():
            attach_value(index, (known if used is None else used).reshape(1, -1))
    values = grad.new_empty(index.shape[1], grad.shape[1])
    return make_sparse(Parts(index, values), (int(args[6]), grad.shape[1]), is_coalesced=False)


@workspace(BAG_BACKWARD)
def _bag_gradient_workspace(*args: Any, **_kwargs: Any) -> int:
    """The bag of each index, sizes of bags to divide by; where some do not count, all values."""
    grad, indices, offsets, bag_of = args[:4]
    count, bags, itemsize = indices.numel(), offsets.numel(), indices.element_size()
    if count and not bag_of.numel():
        return int((count + 1) * itemsize)
    divided = (2 * bags + count) * grad.element_size() if args[_MODE] == _MEAN else 0
    used = _find_used(args)
    if used is None:
        return int(divided)
    return int(count * (grad.shape[1] * grad.element_size() + 1) + used.numel() * INDEX_BYTES)


def _find_used(args: tuple[Any, ...]) -> Tensor | None:
    """The indices that are no padding; None where there is no padding."""
    padding = args[_PADDING] if len(args) > _PADDING else -1
    if padding < 0:
        return None
    known = find_value(args[1])
    if known is None:
        raise DataDependentOutputException(_aten.index.Tensor)
    with _disable_current_modes():
        return known[known != padding]

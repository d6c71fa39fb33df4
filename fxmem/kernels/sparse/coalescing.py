"""Coalescing, which makes one element of those at one place, and masking."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.kernels.sparse.elements import check_exact, copy
from fxmem.kernels.sparse.registry import INDEX_BYTES, kernel, workspace
from fxmem.kernels.tape import size_bytes
from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import Parts, find_parts, is_sparse, make_sparse

_aten = torch.ops.aten


def coalesce(sparse: Tensor, elements: int) -> Tensor:
    """``_coalesce_sparse_cpu``: room for all elements, of which so many are used."""
    parts = find_parts(sparse)
    indices = torch.empty_like(parts.indices, memory_format=torch.contiguous_format)
    values = torch.empty_like(parts.values, memory_format=torch.contiguous_format)
    narrowed = Parts(indices[:, :elements], values[:elements])
    known = find_value(parts.indices)
    if known is not None:
        with _disable_current_modes():
            attach_value(narrowed.indices, torch.unique(known, dim=1))
    return make_sparse(narrowed, sparse.shape, is_coalesced=True)


@kernel(_aten._coalesce.default)
def _coalesce(sparse: Tensor) -> Tensor:
    known = find_value(find_parts(sparse).indices)
    if known is None:
        raise DataDependentOutputException(_aten._coalesce.default)
    with _disable_current_modes():
        elements = torch.unique(known, dim=1).shape[1]
    return coalesce(sparse, elements)


@workspace(_aten._coalesce.default)
def estimate_coalescing(sparse: Tensor) -> int:
    """Keys of the elements where they have several, sorted keys, their order, the first order."""
    indices, values = find_parts(sparse).indices, find_parts(sparse).values
    dims, elements = indices.shape
    sorting_bytes = (3 + (dims > 1)) * elements * INDEX_BYTES
    return sorting_bytes + (0 if values.is_contiguous() else size_bytes(values))


@kernel(_aten.sparse_mask.default)
def _sparse_mask(dense: Tensor, mask: Tensor) -> Any:
    if is_sparse(dense):
        return NotImplemented
    parts = find_parts(mask)
    values = dense.new_empty(parts.values.shape)
    masked = Parts(copy(parts.indices), values, check_exact(mask))
    return make_sparse(masked, dense.shape, is_coalesced=mask.is_coalesced())


@workspace(_aten.sparse_mask.default)
def _sparse_mask_workspace(dense: Tensor, mask: Tensor) -> int:
    """What was found there is multiplied by one."""
    return size_bytes(find_parts(mask).values) + dense.element_size()

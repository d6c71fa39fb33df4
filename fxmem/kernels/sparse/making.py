"""Making sparse tensors, taking them apart, and copying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.sparse.elements import alias, check_exact, copy
from fxmem.kernels.sparse.registry import CONSTRUCT, kernel
from fxmem.tracing.sparse_parts import Parts, find_parts, is_sparse, make_sparse, replace_parts

_aten = torch.ops.aten


@kernel(CONSTRUCT)
def _construct_sparse(
    sparse_dim: int,
    dense_dim: int,
    size: Sequence[int],
    indices: Tensor,
    values: Tensor,
    *,
    is_coalesced: bool | None = None,
    **_options: Any,
) -> Tensor:
    parts = Parts(alias(indices), alias(values))
    return make_sparse(parts, size, is_coalesced=bool(is_coalesced))


@kernel(_aten._indices.default)
def _indices(sparse: Tensor) -> Tensor:
    return alias(find_parts(sparse).indices)


@kernel(_aten._values.default)
def _values(sparse: Tensor) -> Tensor:
    return alias(find_parts(sparse).values)


@kernel(_aten.detach.default)
def _detach(sparse: Tensor) -> Tensor:
    return make_sparse(find_parts(sparse), sparse.shape, is_coalesced=sparse.is_coalesced())


@kernel(_aten.clone.default)
def _clone(sparse: Tensor, *, memory_format: Any = None) -> Tensor:
    parts = find_parts(sparse)
    copied = Parts(copy(parts.indices), parts.values.clone(), check_exact(sparse))
    return make_sparse(copied, sparse.shape, is_coalesced=sparse.is_coalesced())


@kernel(_aten.copy_.default)
def _copy_into(sparse: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    both = is_sparse(sparse) and is_sparse(source)
    return replace_parts(sparse, _clone(source)) if both else NotImplemented


@kernel(_aten.zero_.default)
def _zero(sparse: Tensor) -> Tensor:
    """``zero_sparse_``: no element is left."""
    parts = find_parts(sparse)
    empty = Parts(parts.indices.new_empty(parts.indices.shape[0], 0), parts.values[:0].clone())
    return replace_parts(sparse, make_sparse(empty, sparse.shape, is_coalesced=True))


@kernel(_aten._to_dense.default)
def _to_dense(sparse: Tensor, dtype: Any = None, masked_grad: Any = None) -> Tensor:
    return torch.zeros(sparse.shape, dtype=dtype or sparse.dtype, device=sparse.device)

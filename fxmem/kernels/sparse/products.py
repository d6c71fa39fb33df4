"""Products of sparse matrices and dense ones, and transposition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.kernels.sparse.elements import check_exact
from fxmem.kernels.sparse.registry import INDEX_BYTES, kernel, workspace
from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import Parts, find_parts, is_sparse, make_sparse

_aten = torch.ops.aten


@kernel(_aten.mm.default)
def _multiply(one: Tensor, other: Tensor) -> Any:
    """``_sparse_mm``: a sparse matrix by a dense one."""
    return NotImplemented if is_sparse(other) else other.new_empty(one.shape[0], other.shape[1])


@workspace(_aten.mm.default)
def _multiply_workspace(one: Tensor, other: Tensor) -> int:
    """The zeros that it is added to."""
    return one.shape[0] * other.shape[1] * other.element_size()


@kernel(_aten._sparse_addmm.default, _aten.addmm.default)
def _add_product(to: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return NotImplemented if is_sparse(to) else _multiply(one, other)


@kernel(_aten.t.default)
def _transpose(sparse: Tensor) -> Any:
    """``transpose_sparse_``: of a copy."""
    parts = find_parts(sparse)
    if parts.indices.shape[0] != 2:
        return NotImplemented
    turned = Parts(parts.indices.clone(), parts.values.clone(), check_exact(sparse))
    known = find_value(parts.indices)
    if known is not None:
        with _disable_current_modes():
            attach_value(turned.indices, known.flip(0))
    return make_sparse(turned, sparse.shape[::-1], is_coalesced=False)


@workspace(_aten.t.default)
def _transpose_workspace(sparse: Tensor) -> int:
    """One row of the indices, while they are swapped."""
    return find_parts(sparse).indices.shape[1] * INDEX_BYTES

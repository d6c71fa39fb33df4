"""Sums of sparse tensors and dense ones, and multiples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.kernels.sparse.coalescing import estimate_coalescing
from fxmem.kernels.sparse.elements import are_contiguous, attach_joined, check_exact, copy
from fxmem.kernels.sparse.registry import kernel, workspace
from fxmem.kernels.tape import size_bytes
from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import Parts, find_parts, is_sparse, make_sparse, replace_parts

_aten = torch.ops.aten
_DOUBLE_BYTES = 8


@kernel(_aten.add.Tensor, _aten.sub.Tensor)
def _add(one: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if not (isinstance(other, Tensor) and is_sparse(other)):
        return NotImplemented
    if not is_sparse(one):
        return torch.empty(one.shape, dtype=one.dtype, device=one.device)
    parts = _add_parts(find_parts(one), find_parts(other))
    both = one.is_coalesced() and other.is_coalesced() and are_contiguous(one, other)
    return make_sparse(parts, one.shape, is_coalesced=both)


@kernel(_aten.add_.Tensor, _aten.sub_.Tensor)
def _add_in_place(one: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if not is_sparse(one):
        return one
    result = _add(one, other, alpha=alpha)
    return result if result is NotImplemented else replace_parts(one, result)


@workspace(_aten.sub.Tensor, _aten.sub_.Tensor)
def _subtract_workspace(one: Tensor, other: Tensor, *, alpha: Any = 1) -> int:
    return _add_workspace(one, other, alpha=-alpha)


@workspace(_aten.add.Tensor, _aten.add_.Tensor)
def _add_workspace(one: Tensor, other: Tensor, *, alpha: Any = 1) -> int:
    values = find_parts(other).values
    if is_sparse(one):
        return 0 if alpha == 1 or are_contiguous(one, other) else size_bytes(values)
    if values.is_contiguous() and one.is_contiguous():
        return 0
    indices = find_parts(other).indices  # add_out_dense_sparse_cpu, the slow path: coalesced
    if other.is_coalesced():
        return 0
    return estimate_coalescing(other) + size_bytes(values) + size_bytes(indices)


def _add_parts(one: Parts, other: Parts) -> Parts:
    """``add_out_sparse_contiguous``, which merges, or ``add_out_sparse_non_contiguous``."""
    if not (one.values.is_contiguous() and other.values.is_contiguous()):
        indices = torch.cat([one.indices, other.indices], 1)
        attach_joined(indices, one.indices, other.indices)
        values = torch.cat([one.values, other.values])
        return Parts(indices, values, one.is_exact and other.is_exact)
    most = one.indices.shape[1] + other.indices.shape[1]
    indices = one.indices.new_empty(one.indices.shape[0], most)
    values = one.values.new_empty(most, *one.values.shape[1:])
    first, second = find_value(one.indices), find_value(other.indices)
    if first is None or second is None:
        return Parts(indices, values, is_exact=False)
    merged = _merge(first, second)
    narrowed = Parts(indices[:, : merged.shape[1]], values[: merged.shape[1]])
    attach_value(narrowed.indices, merged)
    return narrowed


def _merge(first: Tensor, second: Tensor) -> Tensor:
    """The walk of ``add_out_sparse_contiguous``: equal elements that meet become one."""
    with _disable_current_modes():
        left, right = (list(map(tuple, t.t().tolist())) for t in (first, second))
        merged = []
        i = k = 0
        while i < len(left) or k < len(right):
            take_left = k >= len(right) or (i < len(left) and left[i] <= right[k])
            take_right = i >= len(left) or (k < len(right) and right[k] <= left[i])
            merged.append(left[i] if take_left else right[k])
            i, k = i + take_left, k + take_right
        return torch.tensor(merged, dtype=torch.int64).reshape(-1, first.shape[0]).t()


@kernel(_aten.mul.Tensor, _aten.neg.default)
def _scale(sparse: Tensor, factor: Any = None, *, in_place: bool = False) -> Any:
    """By a number or by a tensor without dimensions."""
    if not is_sparse(sparse) or (isinstance(factor, Tensor) and factor.dim()):
        return NotImplemented
    parts = find_parts(sparse)
    values = parts.values.new_empty(parts.values.shape)
    scaled = Parts(copy(parts.indices), values, check_exact(sparse))
    is_coalesced = sparse.is_coalesced() and not in_place
    return make_sparse(scaled, sparse.shape, is_coalesced=is_coalesced)


@kernel(_aten.mul_.Tensor)
def _scale_in_place(sparse: Tensor, factor: Any) -> Any:
    """Into new memory, which is not known to be coalesced."""
    result = _scale(sparse, factor, in_place=True)
    return result if result is NotImplemented else replace_parts(sparse, result)


@workspace(_aten.mul.Tensor, _aten.mul_.Tensor)
def _scale_workspace(sparse: Tensor, factor: Any) -> int:
    """A number becomes a tensor, and one of the values' type."""
    return 0 if isinstance(factor, Tensor) else _DOUBLE_BYTES + sparse.element_size()

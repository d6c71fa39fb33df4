"""Operators on sparse tensors in coordinate format, as gradients of embeddings are.

PyTorch's fake kernels give results without elements. These give results with as many as the CPU's
kernels do (aten/src/ATen/native/sparse/SparseTensor.cpp and SparseTensorMath.cpp), and say what
those hold while they run. An operator that is not here is refused: what it would be told to
allocate would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.errors import TraceError
from fxmem.lowering.tape import size_bytes
from fxmem.tracing.known_values import attach_value, find_value
from fxmem.tracing.sparse_parts import Parts, find_parts, is_sparse, make_sparse, replace_parts

_aten = torch.ops.aten
_construct = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_bag_backward = _aten._embedding_bag_backward.default
_MAKERS = (_construct, _bag_backward)
_BAG_MODE, _BAG_SPARSE = 8, 9  # positions of its arguments
_MEAN = 1
_INDEX_BYTES = 8
_DOUBLE_BYTES = 8

_Kernel = Callable[..., Any]
_Estimator = Callable[..., int]
_KERNELS: dict[Any, _Kernel] = {}
_WORKSPACES: dict[Any, _Estimator] = {}
_QUESTIONS = frozenset(
    {
        _aten.is_coalesced.default,
        _aten.sparse_dim.default,
        _aten.dense_dim.default,
        _aten._nnz.default,
        _aten._dimI.default,
        _aten._dimV.default,
        _aten.is_same_size.default,
    }
)
"""What fake kernels answer as real ones do."""


def is_on_sparse(func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
    """Whether an operator makes a sparse tensor or reads one.

    Args:
        func: The operator.
        args: Its positional arguments.
        tensors: The tensors among all of its arguments.
    """
    if func in _MAKERS:
        return func is not _bag_backward or args[_BAG_SPARSE] is True
    return any(map(is_sparse, tensors))


def run_on_sparse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on fake sparse tensors.

    Raises:
        TraceError: It is not modelled.
        DataDependentOutputException: How many elements there are depends on values.
    """
    if func in _QUESTIONS:
        return func(*args, **kwargs)
    result = _KERNELS[func](*args, **kwargs) if func in _KERNELS else NotImplemented
    if result is NotImplemented:
        raise TraceError(
            f"{func} of a sparse tensor is not modelled",
            hint="sparse=False, or dense tensors, tell an upper bound",
        )
    return result


def estimate_sparse_workspace(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that the kernel holds beside its results; to be asked before it runs."""
    return _WORKSPACES[func](*args, **kwargs) if func in _WORKSPACES else 0


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


def _kernel(*operators: Any) -> Callable[[_Kernel], _Kernel]:
    def register(kernel: _Kernel) -> _Kernel:
        _KERNELS.update(dict.fromkeys(operators, kernel))
        return kernel

    return register


def _workspace(*operators: Any) -> Callable[[_Estimator], _Estimator]:
    def register(estimate: _Estimator) -> _Estimator:
        _WORKSPACES.update(dict.fromkeys(operators, estimate))
        return estimate

    return register


# -- making, taking apart, copying -----------------------------------------------------------------


@_kernel(_construct)
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
    parts = Parts(_alias(indices), _alias(values))
    return make_sparse(parts, size, is_coalesced=bool(is_coalesced))


@_kernel(_aten._indices.default)
def _indices(sparse: Tensor) -> Tensor:
    return _alias(find_parts(sparse).indices)


@_kernel(_aten._values.default)
def _values(sparse: Tensor) -> Tensor:
    return _alias(find_parts(sparse).values)


@_kernel(_aten.detach.default)
def _detach(sparse: Tensor) -> Tensor:
    return make_sparse(find_parts(sparse), sparse.shape, is_coalesced=sparse.is_coalesced())


@_kernel(_aten.clone.default)
def _clone(sparse: Tensor, *, memory_format: Any = None) -> Tensor:
    parts = find_parts(sparse)
    copied = Parts(_copy(parts.indices), parts.values.clone(), _check_exact(sparse))
    return make_sparse(copied, sparse.shape, is_coalesced=sparse.is_coalesced())


@_kernel(_aten.copy_.default)
def _copy_into(sparse: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    both = is_sparse(sparse) and is_sparse(source)
    return replace_parts(sparse, _clone(source)) if both else NotImplemented


@_kernel(_aten.zero_.default)
def _zero(sparse: Tensor) -> Tensor:
    """``zero_sparse_``: no element is left."""
    parts = find_parts(sparse)
    empty = Parts(parts.indices.new_empty(parts.indices.shape[0], 0), parts.values[:0].clone())
    return replace_parts(sparse, make_sparse(empty, sparse.shape, is_coalesced=True))


@_kernel(_aten._to_dense.default)
def _to_dense(sparse: Tensor, dtype: Any = None, masked_grad: Any = None) -> Tensor:
    return torch.zeros(sparse.shape, dtype=dtype or sparse.dtype, device=sparse.device)


# -- coalescing and masking ------------------------------------------------------------------------


@_kernel(_aten._coalesce.default)
def _coalesce(sparse: Tensor) -> Tensor:
    known = find_value(find_parts(sparse).indices)
    if known is None:
        raise DataDependentOutputException(_aten._coalesce.default)
    with _disable_current_modes():
        elements = torch.unique(known, dim=1).shape[1]
    return coalesce(sparse, elements)


@_workspace(_aten._coalesce.default)
def _coalesce_workspace(sparse: Tensor) -> int:
    """Keys of the elements where they have several, sorted keys, their order, the first order."""
    indices, values = find_parts(sparse).indices, find_parts(sparse).values
    dims, elements = indices.shape
    sorting_bytes = (3 + (dims > 1)) * elements * _INDEX_BYTES
    return sorting_bytes + (0 if values.is_contiguous() else size_bytes(values))


@_kernel(_aten.sparse_mask.default)
def _sparse_mask(dense: Tensor, mask: Tensor) -> Any:
    if is_sparse(dense):
        return NotImplemented
    parts = find_parts(mask)
    values = dense.new_empty(parts.values.shape)
    masked = Parts(_copy(parts.indices), values, _check_exact(mask))
    return make_sparse(masked, dense.shape, is_coalesced=mask.is_coalesced())


@_workspace(_aten.sparse_mask.default)
def _sparse_mask_workspace(dense: Tensor, mask: Tensor) -> int:
    """What was found there is multiplied by one."""
    return size_bytes(find_parts(mask).values) + dense.element_size()


# -- arithmetic ------------------------------------------------------------------------------------


@_kernel(_aten.add.Tensor, _aten.sub.Tensor)
def _add(one: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if not (isinstance(other, Tensor) and is_sparse(other)):
        return NotImplemented
    if not is_sparse(one):
        return torch.empty(one.shape, dtype=one.dtype, device=one.device)
    parts = _add_parts(find_parts(one), find_parts(other))
    both = one.is_coalesced() and other.is_coalesced() and _are_contiguous(one, other)
    return make_sparse(parts, one.shape, is_coalesced=both)


@_kernel(_aten.add_.Tensor, _aten.sub_.Tensor)
def _add_in_place(one: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if not is_sparse(one):
        return one
    result = _add(one, other, alpha=alpha)
    return result if result is NotImplemented else replace_parts(one, result)


@_workspace(_aten.sub.Tensor, _aten.sub_.Tensor)
def _subtract_workspace(one: Tensor, other: Tensor, *, alpha: Any = 1) -> int:
    return _add_workspace(one, other, alpha=-alpha)


@_workspace(_aten.add.Tensor, _aten.add_.Tensor)
def _add_workspace(one: Tensor, other: Tensor, *, alpha: Any = 1) -> int:
    values = find_parts(other).values
    if is_sparse(one):
        return 0 if alpha == 1 or _are_contiguous(one, other) else size_bytes(values)
    if values.is_contiguous() and one.is_contiguous():
        return 0
    indices = find_parts(other).indices  # add_out_dense_sparse_cpu, the slow path: coalesced
    if other.is_coalesced():
        return 0
    return _coalesce_workspace(other) + size_bytes(values) + size_bytes(indices)


def _add_parts(one: Parts, other: Parts) -> Parts:
    """``add_out_sparse_contiguous``, which merges, or ``add_out_sparse_non_contiguous``."""
    if not (one.values.is_contiguous() and other.values.is_contiguous()):
        indices = torch.cat([one.indices, other.indices], 1)
        _attach_joined(indices, one.indices, other.indices)
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


@_kernel(_aten.mul.Tensor, _aten.neg.default)
def _scale(sparse: Tensor, factor: Any = None, *, in_place: bool = False) -> Any:
    """By a number or by a tensor without dimensions."""
    if not is_sparse(sparse) or (isinstance(factor, Tensor) and factor.dim()):
        return NotImplemented
    parts = find_parts(sparse)
    values = parts.values.new_empty(parts.values.shape)
    scaled = Parts(_copy(parts.indices), values, _check_exact(sparse))
    is_coalesced = sparse.is_coalesced() and not in_place
    return make_sparse(scaled, sparse.shape, is_coalesced=is_coalesced)


@_kernel(_aten.mul_.Tensor)
def _scale_in_place(sparse: Tensor, factor: Any) -> Any:
    """Into new memory, which is not known to be coalesced."""
    result = _scale(sparse, factor, in_place=True)
    return result if result is NotImplemented else replace_parts(sparse, result)


@_workspace(_aten.mul.Tensor, _aten.mul_.Tensor)
def _scale_workspace(sparse: Tensor, factor: Any) -> int:
    """A number becomes a tensor, and one of the values' type."""
    return 0 if isinstance(factor, Tensor) else _DOUBLE_BYTES + sparse.element_size()


# -- products --------------------------------------------------------------------------------------


@_kernel(_aten.mm.default)
def _multiply(one: Tensor, other: Tensor) -> Any:
    """``_sparse_mm``: a sparse matrix by a dense one."""
    return NotImplemented if is_sparse(other) else other.new_empty(one.shape[0], other.shape[1])


@_workspace(_aten.mm.default)
def _multiply_workspace(one: Tensor, other: Tensor) -> int:
    """The zeros that it is added to."""
    return one.shape[0] * other.shape[1] * other.element_size()


@_kernel(_aten._sparse_addmm.default, _aten.addmm.default)
def _add_product(to: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return NotImplemented if is_sparse(to) else _multiply(one, other)


@_kernel(_aten.t.default)
def _transpose(sparse: Tensor) -> Any:
    """``transpose_sparse_``: of a copy."""
    parts = find_parts(sparse)
    if parts.indices.shape[0] != 2:
        return NotImplemented
    turned = Parts(parts.indices.clone(), parts.values.clone(), _check_exact(sparse))
    known = find_value(parts.indices)
    if known is not None:
        with _disable_current_modes():
            attach_value(turned.indices, known.flip(0))
    return make_sparse(turned, sparse.shape[::-1], is_coalesced=False)


@_workspace(_aten.t.default)
def _transpose_workspace(sparse: Tensor) -> int:
    """One row of the indices, while they are swapped."""
    return find_parts(sparse).indices.shape[1] * _INDEX_BYTES


# -- bags of embeddings ----------------------------------------------------------------------------


@_kernel(_bag_backward)
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


@_workspace(_bag_backward)
def _bag_gradient_workspace(*args: Any, **_kwargs: Any) -> int:
    """The bag of each index, sizes of bags to divide by; where some do not count, all values."""
    grad, indices, offsets, bag_of = args[:4]
    count, bags, itemsize = indices.numel(), offsets.numel(), indices.element_size()
    if count and not bag_of.numel():
        return int((count + 1) * itemsize)
    divided = (2 * bags + count) * grad.element_size() if args[_BAG_MODE] == _MEAN else 0
    used = _find_used(args)
    if used is None:
        return int(divided)
    return int(count * (grad.shape[1] * grad.element_size() + 1) + used.numel() * _INDEX_BYTES)


def _find_used(args: tuple[Any, ...]) -> Tensor | None:
    """The indices that are no padding; None where there is no padding."""
    padding = args[11] if len(args) > 11 else -1
    if padding < 0:
        return None
    known = find_value(args[1])
    if known is None:
        raise DataDependentOutputException(_aten.index.Tensor)
    with _disable_current_modes():
        return known[known != padding]


# -- parts -----------------------------------------------------------------------------------------


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(find_parts(tensor).values.is_contiguous() for tensor in tensors)


def _check_exact(sparse: Tensor) -> bool:
    """True, where it is known how many elements there are."""
    if not find_parts(sparse).is_exact:
        raise DataDependentOutputException(_aten._coalesce.default)
    return True


def _alias(part: Tensor) -> Tensor:
    alias = part.detach()
    known = find_value(part)
    if known is not None:
        attach_value(alias, known)
    return alias


def _copy(indices: Tensor) -> Tensor:
    copied = indices.clone()
    known = find_value(indices)
    if known is not None:
        attach_value(copied, known)
    return copied


def _attach_joined(joined: Tensor, first: Tensor, second: Tensor) -> None:
    known = find_value(first), find_value(second)
    if known[0] is not None and known[1] is not None:
        with _disable_current_modes():
            attach_value(joined, torch.cat([known[0], known[1]], 1))

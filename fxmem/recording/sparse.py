"""Sparse tensors (COO): their operators as those on indices and values that ATen's kernels run.

Sources: ``SparseTensor.cpp`` and ``SparseTensorMath.cpp`` in ``aten/src/ATen/native/sparse``; for
GPUs ``SparseCUDATensor.cu`` and ``SparseCUDATensorMath.cu`` in its folder ``cuda``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from fxmem.errors import TraceError
from fxmem.fakes.sparse import assign_parts, make_sparse, read_parts
from fxmem.fakes.values import find_attached, find_known
from fxmem.versions.operators import aten

if TYPE_CHECKING:
    from fxmem.recording.recorder import Recorder

_MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
MAKERS = frozenset({_MAKE, aten._to_sparse.default, aten._to_sparse.sparse_dim})
"""Operators that make sparse tensors of dense ones."""
BAG, BAG_IS_SPARSE = aten._embedding_bag_backward.default, 9
"""One that makes a sparse gradient or a dense one, and the position of its flag."""
_MEAN = 1
"""The mode of a bag that divides by its size."""
_QUERIES = frozenset(
    {
        aten.is_coalesced.default,
        aten._coalesced_.default,
        aten._nnz.default,
        aten.sparse_dim.default,
        aten.dense_dim.default,
    }
)
_ACCUMULATE = "torch::autograd::AccumulateGrad"


def run_on_parts(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs an operator that reads or makes sparse tensors; operators on the parts are recorded.

    Raises:
        TraceError: It is not known what the operator's kernel runs.
    """
    if func in _QUERIES:
        with no_dispatch():
            return func(*args, **kwargs)
    if func is _MAKE:
        return _make(recorder, *args, **kwargs)
    if func not in _OPERATORS:
        _refuse(func)
    with recorder, torch.no_grad():
        return _OPERATORS[func](recorder, *args, **kwargs)


def _refuse(func: object) -> NoReturn:
    raise TraceError(f"{func} of sparse tensors is not supported", hint="use dense ones there")


# -- parts and copies ------------------------------------------------------------------------------


def _make(
    recorder: Recorder,
    _sparse_dim: int,
    _dense_dim: int,
    shape: list[int],
    indices: Tensor,
    values: Tensor,
    *,
    is_coalesced: bool | None = None,
    **_options: Any,
) -> Tensor:
    find_fake = recorder.real_tensors.find_fake
    indices, values = find_fake(indices), find_fake(values)
    return make_sparse(indices, values, shape, is_coalesced=bool(is_coalesced))


def _read_indices(_recorder: Recorder, tensor: Tensor) -> Tensor:
    return read_parts(tensor)[0]


def _read_values(_recorder: Recorder, tensor: Tensor) -> Tensor:
    return read_parts(tensor)[1]


def _make_like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return make_sparse(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())


def _assign(recorder: Recorder, tensor: Any, made: Any) -> Tensor:
    """Changes a sparse tensor in place: its parts are those of one that was made."""
    assign_parts(tensor, made)
    for old, new in zip(read_parts(made), read_parts(tensor), strict=True):
        recorder.ledger.hand_over(old.untyped_storage(), new.untyped_storage())
    changed: Tensor = tensor
    return changed


def _detach(_recorder: Recorder, tensor: Tensor) -> Tensor:
    return _make_like(tensor, *read_parts(tensor))


def _clone(_recorder: Recorder, tensor: Tensor, **_options: Any) -> Tensor:
    indices, values = read_parts(tensor)
    running = torch._C._current_autograd_node()
    if running is not None and running.name() == _ACCUMULATE:
        # Eager takes the gradient's parts, to which fakes have more references:
        # torch/csrc/autograd/functions/accumulate_grad.h.
        return _make_like(tensor, indices, values)
    return _make_like(tensor, indices.clone(), values.clone())


def _copy_to(
    _recorder: Recorder, tensor: Tensor, *, dtype: Any = None, device: Any = None, **_options: Any
) -> Tensor:
    indices, values = read_parts(tensor)
    indices = aten._to_copy(indices, device=device)
    return _make_like(tensor, indices, aten._to_copy(values, dtype=dtype, device=device))


def _transpose(_recorder: Recorder, tensor: Tensor, one: int = 0, other: int = 1) -> Tensor:
    indices, values = (part.clone() for part in read_parts(tensor))
    one, other = one % tensor.dim(), other % tensor.dim()
    if max(one, other) >= len(indices):
        _refuse(aten.transpose.int)
    row = indices[one].clone()
    indices[one].copy_(indices[other])
    indices[other].copy_(row)
    shape = list(tensor.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return make_sparse(indices, values, shape)


# -- one element for each index --------------------------------------------------------------------


def _flatten_indices(tensor: Tensor) -> Tensor:
    """Makes one index of several; of one, a view."""
    indices, _ = read_parts(tensor)
    if len(indices) == 1:
        return indices.squeeze(0)
    strides = [[prod(tensor.shape[dim + 1 : len(indices)])] for dim in range(len(indices))]
    return (indices * torch.tensor(strides).to(indices.device)).sum(0)


def _coalesce(recorder: Recorder, tensor: Tensor) -> Tensor:
    indices, values = read_parts(tensor)
    flat = _flatten_indices(tensor)
    count = _count_different(recorder, flat)
    if recorder.target.name == "cpu":  # parts of buffers for all
        buffers = torch.empty_like(indices), torch.empty_like(values)
        flat.sort(0)
        indices, values = buffers[0][:, :count], buffers[1][:count]
        return make_sparse(indices, values, tensor.shape, is_coalesced=True)
    if len(indices) == 1:
        flat = flat.clone()
    order, offsets = torch.empty_like(flat), torch.empty_like(flat)
    torch.empty_like(flat, dtype=torch.complex128)  # Thrust's merge sort: a key and a value each
    values = values.new_empty((count, *values.shape[1:]))
    del order, offsets
    is_flat = len(indices) == 1
    indices = flat[:count].unsqueeze(0) if is_flat else indices.new_empty((len(indices), count))
    return make_sparse(indices, values, tensor.shape, is_coalesced=True)


def _count_different(recorder: Recorder, flat: Tensor) -> int:
    """Counts the indices that differ; if they are not known, as many as the user says, or all."""
    known = find_known(flat)
    if known is not None:
        with no_dispatch():
            return len({*known.real.tolist()})
    hints = recorder.runner.hints
    own = hints.find_own()
    hint = hints.default if own is None else own
    return len(flat) if hint is None else min(hint, len(flat))


def _find_coalesced(recorder: Recorder, tensor: Tensor) -> Tensor:
    return tensor if tensor.is_coalesced() else _coalesce(recorder, tensor)


# -- sparse tensors of dense ones, and back --------------------------------------------------------


def _make_dense(recorder: Recorder, tensor: Tensor, dtype: Any = None, **_options: Any) -> Tensor:
    _, values = read_parts(tensor)
    return _add_in_place(recorder, values.new_zeros(tensor.shape, dtype=dtype), tensor)


def _make_sparse(_recorder: Recorder, tensor: Tensor, sparse_dim: int | None = None) -> Tensor:
    if sparse_dim not in (None, tensor.dim()):
        _refuse(aten._to_sparse.sparse_dim)
    indices = tensor.nonzero().t().clone(memory_format=torch.contiguous_format)
    return make_sparse(indices, tensor[tuple(indices)], tensor.shape, is_coalesced=True)


def _find_bag_gradient(
    _recorder: Recorder,
    gradient: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    _most: Tensor,
    rows: int,
    _scales: bool,
    mode: int,
    _sparse: bool,
    weights: Tensor | None = None,
    padding: int = -1,
) -> Tensor:
    """Finds the gradient of a bag's table (``aten/src/ATen/native/EmbeddingBag.cpp``)."""
    if not len(bags):
        bags = offsets.new_zeros(len(indices) + 1)
        bags.index_add_(0, offsets, torch.ones_like(offsets))
        bags = bags.cumsum(0)[: len(indices)]
    gradient = gradient.index_select(0, bags)
    if mode == _MEAN:
        gradient *= (1 / sizes.to(gradient.dtype).unsqueeze(1)).index_select(0, bags)
    if weights is not None:
        gradient.mul_(weights.unsqueeze(1))
    if padding >= 0:
        is_other = indices != padding
        indices, gradient = indices[is_other], gradient[is_other]
    return make_sparse(indices.view(1, -1), gradient, (rows, gradient.shape[-1]))


def _mask(recorder: Recorder, tensor: Tensor, mask: Tensor) -> Tensor:
    indices, values = read_parts(mask)
    if tensor.is_sparse:  # SparseBinaryOpIntersectionCommon.h: hashes, their order, and pairs
        order, pairs = torch.arange(len(values), device=values.device), torch.empty_like(indices)
        hashes = _flatten_indices(tensor).clone()
        values = values.new_empty(values.shape, dtype=tensor.dtype)
        del order, hashes, pairs
        return _make_like(mask, indices.clone(), values)
    ones = values.new_ones(1).expand_as(values)
    return _multiply(recorder, tensor, _make_like(mask, indices, ones))


# -- arithmetic ------------------------------------------------------------------------------------


def _add(recorder: Recorder, one: Tensor, other: Tensor, *, alpha: Any = 1) -> Tensor:
    if not one.is_sparse:
        return _add_in_place(recorder, one.clone(), other, alpha=alpha)
    (indices, values), (more_indices, more) = read_parts(one), read_parts(other)
    if alpha != 1:
        more = more * alpha
    values = torch.cat([values, more])
    return make_sparse(torch.cat([indices, more_indices], 1), values, one.shape)


def _add_in_place(recorder: Recorder, one: Tensor, other: Tensor, *, alpha: Any = 1) -> Tensor:
    if one.is_sparse:
        return _assign(recorder, one, _add(recorder, one, other, alpha=alpha))
    indices, values = read_parts(other)
    if recorder.target.name == "cpu" or other.is_coalesced():
        if (value := find_attached(one)) is not None:
            value.memory.known = False
        return one.fill_(0)  # written, without more memory
    rows = one.view(-1, *one.shape[len(indices) :])
    rows.index_add_(0, _flatten_indices(other), values, alpha=alpha)
    return one


def _multiply(_recorder: Recorder, one: Any, other: Any) -> Tensor:
    if not (isinstance(one, Tensor) and one.is_sparse):
        one, other = other, one
    indices, values = read_parts(one)
    if isinstance(other, Tensor) and other.is_sparse:
        _refuse(aten.mul.Tensor)
    if isinstance(other, Tensor) and other.dim():
        other = other[tuple(indices)]
    return _make_like(one, indices.clone(), values * other)


def _divide(_recorder: Recorder, one: Tensor, other: Any) -> Tensor:
    indices, values = read_parts(one)
    return _make_like(one, indices.clone(), values / other)


def _raise_to_power(recorder: Recorder, one: Tensor, exponent: Any) -> Tensor:
    indices, values = read_parts(_find_coalesced(recorder, one))
    return make_sparse(indices.clone(), values**exponent, one.shape, is_coalesced=True)


# -- products --------------------------------------------------------------------------------------


def _multiply_matrices(recorder: Recorder, one: Tensor, other: Tensor) -> Tensor:
    if not one.is_sparse:
        return _multiply_matrices(recorder, _transpose(recorder, other), one.t()).t()
    if other.is_sparse:
        _refuse(aten.mm.default)
    start = other.new_zeros(one.shape[0], other.shape[1])
    return _add_product(recorder, start, one, other, beta=0)


def _add_product(
    recorder: Recorder, start: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    result = other.new_empty(one.shape[0], other.shape[1])
    if recorder.target.name == "cpu":
        return result.fill_(0)
    (rows, columns), _ = read_parts(_find_coalesced(recorder, one))
    # For cuSPARSE: rows compressed, 32 bits for an index, and the result by columns.
    compressed = rows.new_empty(one.shape[0] + 1, dtype=torch.int32)
    rows.to(torch.int32)
    short = columns.to(torch.int32)
    result.copy_(start)
    turned = result.t().clone(memory_format=torch.contiguous_format)
    copied = None if 1 in other.stride() else other.contiguous()
    result.copy_(turned.t())
    del compressed, short, copied
    return result


_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    aten._indices.default: _read_indices,
    aten.indices.default: _read_indices,
    aten._values.default: _read_values,
    aten.values.default: _read_values,
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _copy_to,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten._coalesce.default: _coalesce,
    aten._to_dense.default: _make_dense,
    aten._to_sparse.default: _make_sparse,
    aten._to_sparse.sparse_dim: _make_sparse,
    BAG: _find_bag_gradient,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_in_place,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _divide,
    aten.pow.Tensor_Scalar: _raise_to_power,
    aten.mm.default: _multiply_matrices,
    aten.addmm.default: _add_product,
    aten._sparse_addmm.default: _add_product,
}

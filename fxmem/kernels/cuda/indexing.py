"""Indexing on CUDA: masks become indices, and sums at equal indices are made in their order.

Source: ``aten/src/ATen/native/cuda/Indexing.cu``, ``IndexKernel.cpp``, ``Nonzero.cu`` and
``TensorAdvancedIndexing.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes
from fxmem.kernels.registry import OperatorCall, as_tensor
from fxmem.kernels.workspace import BlockTrace, broadcast_sizes, dense_bytes, size_bytes

_MASKS = (torch.bool, torch.uint8)
_INDEX_BYTES = 8


def _list_indices(found: Sequence[object]) -> list[Tensor | None]:
    return [index if isinstance(index, Tensor) else None for index in found]


def _find_indexed_dims(indices: Sequence[Tensor | None]) -> list[int]:
    """The dimensions that are indexed; a mask stands for its own."""
    dims: list[int] = []
    at = 0
    for index in indices:
        width = index.dim() if index is not None and index.dtype in _MASKS else 1
        if index is not None:
            dims += range(at, at + width)
        at += width
    return dims


def _count_rows(x: Tensor, indices: Sequence[Tensor | None], elements: int) -> int:
    """Counts the indexed positions: as many as the elements have slices."""
    dims = _find_indexed_dims(indices)
    slice_size = math.prod(n for dim, n in enumerate(x.shape) if dim not in dims)
    return elements // max(slice_size, 1)


def _list_expanded(indices: Sequence[Tensor | None], rows: int) -> list[_Index]:
    """``expandTensors``: an index for each dimension that is indexed, masks as positions in them.

    Positions in a mask are in one tensor, which the first of its dimensions stands for.
    """
    expanded = []
    for index in indices:
        if index is None:
            continue
        if index.dtype in _MASKS:
            nbytes = rows * index.dim() * _INDEX_BYTES
            expanded.append(_Index(index, nbytes, is_found=True))
            expanded += [_Index(index, 0, is_found=True)] * (index.dim() - 1)
        else:
            expanded.append(_Index(index, size_bytes(index)))
    return expanded


@dataclass(frozen=True, slots=True)
class _Index:
    tensor: Tensor  # the index itself, or the mask in which it is found
    nbytes: int  # of the copy of an index of another device, or of the positions found
    is_found: bool = False  # whether it is made of a mask

    @property
    def is_on_gpu(self) -> bool:
        return is_on_gpu(self.tensor)


def _make_info(trace: BlockTrace, indices: Sequence[Tensor | None], rows: int) -> None:
    """TensorAdvancedIndexingUtils.h, ``make_info``: indices on the GPU, in 64 bits, of one layout.

    ``AdvancedIndex`` makes indices of several dimensions dense unless their strides agree, as those
    of ``x[rows[:, None], columns]`` do not.
    """
    expanded = _list_expanded(indices, rows)
    moved = [
        trace.allocate(0 if index.is_on_gpu and not index.is_found else index.nbytes)
        for index in expanded
    ]
    for at, index in enumerate(expanded):
        if not index.is_found and index.tensor.dtype != torch.int64:
            converted = trace.allocate(rows * _INDEX_BYTES)
            trace.free(moved[at])
            moved[at] = converted
    if len(expanded) < 2 or any(index.is_found for index in expanded):
        return
    shape = broadcast_sizes(*(index.tensor for index in expanded))
    spread = [index.tensor.expand(shape) for index in expanded]
    if len({index.stride() for index in spread}) > 1:
        dense = [at for at, index in enumerate(spread) if not index.is_contiguous()]
        for _ in dense:
            trace.allocate(rows * _INDEX_BYTES)
        trace.free(*(moved[at] for at in dense))


@CUDA.workspace("index.Tensor", "_unsafe_index.Tensor")
def _index(call: OperatorCall) -> Blocks:
    """TensorAdvancedIndexing.cpp, ``index``: the result is allocated once the indices are ready."""
    x, indices = call.tensor(0), _list_indices(call.args[1])
    trace = BlockTrace()
    _make_info(trace, indices, _count_rows(x, indices, call.result.numel()))
    trace.allocate_result()
    return trace.finish()


@CUDA.workspace("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
def _index_put(call: OperatorCall) -> Blocks:
    """TensorAdvancedIndexing.cpp, ``_index_put_impl_``; ``index_put`` makes its result before."""
    x, values = call.tensor(0), call.tensor(2)
    indices = _list_indices(call.args[1])
    accumulate = call.get(3, "accumulate") is True
    if accumulate or torch.are_deterministic_algorithms_enabled():
        return _put_sorted(x, indices, values)
    is_fill = len(indices) == 1 and values.numel() == 1
    if is_fill and indices[0] is not None and indices[0].dtype in _MASKS:
        return ()  # ``canDispatchToMaskedFill``
    trace = BlockTrace()
    _make_info(trace, indices, _count_put_rows(x, indices, values))
    return trace.finish()


def _count_put_rows(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> int:
    """Positions that are written: where there are masks, as many as there are values."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in _MASKS for index in given):
        return _count_rows(x, indices, values.numel())
    return math.prod(broadcast_sizes(*given))


def _put_sorted(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Blocks:
    """Indexing.cu, ``index_put_with_sort_kernel``."""
    rows = _count_put_rows(x, indices, values)
    dims = _find_indexed_dims(indices)
    slice_size = math.prod(n for dim, n in enumerate(x.shape) if dim not in dims)
    trace, vector = BlockTrace(), rows * _INDEX_BYTES
    trace.allocate(dense_bytes(x))
    _make_linear_index(trace, indices, rows)
    if values.numel() < rows * slice_size or not values.is_contiguous():
        trace.allocate(rows * slice_size * values.element_size())
    is_apart = dims != list(range(dims[0], dims[0] + len(dims)))
    if is_apart:
        trace.allocate(size_bytes(x))  # with the indexed dimensions in front
    for _ in ("sorted indices", "where they were", "their range"):
        trace.allocate(vector)
    behind = slice_size if is_apart else math.prod(x.shape[dims[-1] + 1 :])
    bits = max((x.numel() - 1) // max(behind, 1), 1).bit_length()
    trace.free(trace.allocate(radix_sort_bytes(rows, _INDEX_BYTES, _INDEX_BYTES, bits)))
    return trace.finish()


def _make_linear_index(trace: BlockTrace, indices: Sequence[Tensor | None], rows: int) -> None:
    """``makeLinearIndex``: each index modulo the size, times the stride, added up.

    Indices in the host's memory are multiplied there, and their products copied to the device.
    """
    expanded, vector = _list_expanded(indices, rows), rows * _INDEX_BYTES
    converted = []
    for index in expanded:
        if index.is_on_gpu and index.is_found:
            converted.append(trace.allocate(index.nbytes))
        elif index.is_on_gpu and index.tensor.dtype != torch.int64:
            converted.append(trace.allocate(index.tensor.numel() * _INDEX_BYTES))
    for at, index in enumerate(expanded):
        remainder = trace.allocate(vector if index.is_on_gpu else 0)
        product = trace.allocate(vector)
        trace.free(remainder)
        if at:
            trace.free(product)
    trace.free(*converted)


@CUDA.workspace("nonzero")
def _nonzero(call: OperatorCall) -> int:
    """Nonzero.cu, ``nonzero_cuda_out_impl``: a contiguous input, a count, states of tiles."""
    x = call.tensor(0)
    return dense_bytes(x) + 4 + scan_bytes(x.numel(), 4)


@CUDA.workspace("masked_select")
def _masked_select(call: OperatorCall) -> int:
    """IndexKernel.cpp, ``masked_select_out_cuda_impl``: indexing by the mask, expanded."""
    x, mask = call.tensor(0), call.tensor(1)
    sizes = broadcast_sizes(x, mask)
    copied = math.prod(sizes) if tuple(mask.shape) != sizes or not mask.is_contiguous() else 0
    return max(copied, call.result.numel() * max(len(sizes), 1) * _INDEX_BYTES)


@CUDA.workspace("masked_scatter", "masked_scatter_")
def _masked_scatter(call: OperatorCall) -> int:
    """IndexKernel.cpp, ``masked_scatter__cuda``: the place of each element, dense operands."""
    x, mask, source = (as_tensor(value) for value in call.args[:3])
    count = math.prod(broadcast_sizes(x, mask))
    copied = count if mask.numel() < count or not mask.is_contiguous() else 0
    places = count * _INDEX_BYTES
    return copied + places + max(scan_bytes(count, _INDEX_BYTES), dense_bytes(source))


@CUDA.workspace("masked_scatter_backward")
def _masked_scatter_backward(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_scatter_backward_symint``: a selection, of all."""
    grad = call.tensor(0)
    selected = size_bytes(grad) + grad.numel() * max(grad.dim(), 1) * _INDEX_BYTES
    return max(selected, size_bytes(grad) + call.result_bytes) - call.result_bytes


@CUDA.workspace("repeat_interleave.Tensor")
def _repeat_interleave(call: OperatorCall) -> int:
    """aten/src/ATen/native/Repeat.h, ``repeat_interleave_common``: running sums."""
    repeats = call.tensor(0)
    sums = repeats.numel() * _INDEX_BYTES
    return dense_bytes(repeats) + sums + max(0, scan_bytes(repeats.numel(), 8) - call.result_bytes)


@CUDA.workspace("scatter_reduce.two")
def _scatter_mean(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``scatter_reduce_two``: ones, counts, and where those are 0."""
    if call.args[4] != "mean":
        return 0
    out = call.result
    return size_bytes(call.tensor(3)) + size_bytes(out) + out.numel()

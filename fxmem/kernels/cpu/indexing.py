"""Indexing and scans on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.copying import contiguous_copies_bytes
from fxmem.kernels.cpu.reduction import GRAIN_SIZE, two_pass_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, broadcast_sizes, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_INDEX_BYTES = 8


@CPU.workspace(_aten.embedding.default)
def _embedding(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Embedding.cpp, ``embedding_symint``: ``indices.reshape(-1)``."""
    indices = tensor(args[1])
    return 0 if indices.is_contiguous() else size_bytes(indices)


@CPU.workspace(_aten.embedding_dense_backward.default)
def _embedding_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Embedding.cpp, ``embedding_dense_backward_cpu``: contiguous indices and gradient."""
    return contiguous_copies_bytes(tensor(args[0]), tensor(args[1]))


@CPU.workspace(_aten.cumsum.default, _aten.cumprod.default)
def _cumulative(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/ReduceOps.cpp, ``impl_func_cum_ops``: the input in the result's type."""
    out = tensor(outputs)
    return 0 if tensor(args[0]).dtype == out.dtype else size_bytes(out)


@CPU.workspace(_aten.nll_loss_forward.default)
def _nll_loss(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/LossNLL.cpp, ``nll_loss_out_frame``: contiguous operands."""
    return contiguous_copies_bytes(*(value for value in args[:3] if isinstance(value, Tensor)))


@CPU.workspace(_aten.index_reduce.default, _aten.index_reduce_.default)
def _index_reduce(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``index_reduce_func_impl``: means count what they add up.

    Ones of the source's shape are added to a count for each element.
    """
    if args[4] != "mean":
        return 0
    return size_bytes(tensor(outputs)) + size_bytes(tensor(args[3]))


@CPU.workspace(_aten.index_select.default)
def _index_select(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``index_select_out_cpu_dim1_``."""
    x, dim = tensor(args[0]), int(str(args[1]))
    is_second = x.dim() > 1 and dim % x.dim() == 1
    return size_bytes(x) if is_second and not x.is_contiguous() else 0


@CPU.workspace(_aten.masked_select.default)
def _masked_select(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_select_out_impl_cpu``."""
    found = new_bytes(outputs)
    return _select_bytes(tensor(args[0]), tensor(args[1]), found) - found


def _select_bytes(x: Tensor, mask: Tensor, found_bytes: int) -> int:
    """The mask is counted; then, unless one thread serves, it and its sums become indices."""
    count = math.prod(broadcast_sizes(x, mask))
    tape = Tape()
    counting = (count + 1) * _INDEX_BYTES + two_pass_bytes(count, 1, _INDEX_BYTES)
    tape.free(tape.allocate(counting))
    tape.allocate(found_bytes)
    few = x.numel() < GRAIN_SIZE or torch.get_num_threads() == 1
    if not (few and x.is_contiguous() and mask.is_contiguous()):
        tape.allocate(2 * count * _INDEX_BYTES)
    return tape.peak_bytes


@CPU.workspace(_aten.masked_scatter.default, _aten.masked_scatter_.default)
def _masked_scatter(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_scatter__cpu``: a contiguous source."""
    source = tensor(args[2])
    return 0 if source.is_contiguous() else size_bytes(source)


@CPU.workspace(_aten.masked_scatter_backward.default)
def _masked_scatter_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_scatter_backward_symint``.

    ``masked_select``, of which all is taken to be selected.
    """
    grad = tensor(args[0])
    joined = size_bytes(grad) + new_bytes(outputs)
    selecting = _select_bytes(grad, tensor(args[1]), size_bytes(grad))
    return max(joined, selecting) - new_bytes(outputs)


@CPU.workspace(_aten.index.Tensor)
def _index(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``index_out``; IndexingUtils.h, ``expandTensors``.

    A mask becomes the positions of what it selects, which are as many as the result has.
    """
    return _positions_bytes(args[1], tensor(args[0]), tensor(outputs))


@CPU.workspace(_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
def _index_put(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorAdvancedIndexing.cpp, ``_index_put_impl_``: likewise.

    A single value fills what the mask selects instead.
    """
    values, accumulates = tensor(args[2]), argument(args, kwargs, 3, "accumulate") is True
    if values.numel() == 1 and not accumulates:
        return 0
    return _positions_bytes(args[1], tensor(args[0]), values)


def _positions_bytes(indices: object, x: Tensor, selected: Tensor) -> int:
    """Bytes of the positions that masks among the indices turn into.

    Where the values do not tell how many are selected, all are taken to be.
    """
    assert isinstance(indices, (tuple, list))
    taken = {at: index for at, index in enumerate(indices) if isinstance(index, Tensor)}
    masks = [index for index in taken.values() if _is_mask(index)]
    if not masks:
        return 0
    first, last = min(taken), max(taken)
    lead = first if last - first + 1 == len(taken) else 0
    indexed = sum(index.dim() if _is_mask(index) else 1 for index in taken.values())
    tells = selected.dim() > x.dim() - indexed
    counts = (selected.shape[lead] if tells else mask.numel() for mask in masks)
    return sum(count * mask.dim() * _INDEX_BYTES for count, mask in zip(counts, masks, strict=True))


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


@CPU.workspace(_aten._segment_reduce_backward.default)
def _segment_reduce_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/SegmentReduce.cpp, ``_segment_reduce_backward_kernel``: dense copies."""
    return contiguous_copies_bytes(*(tensor(value) for value in args[:3]))

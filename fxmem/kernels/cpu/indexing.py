"""Indexing, scans and sorting on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxmem.kernels.cpu.copying import copy_contiguous
from fxmem.kernels.cpu.reduction import GRAIN_SIZE, two_pass_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, broadcast_sizes, copy_operands, size_bytes

_INDEX_BYTES = 8


# aten/src/ATen/native/Embedding.cpp
CPU.workspace("embedding")(copy_operands(1))
CPU.workspace("embedding_dense_backward")(copy_contiguous(0, 1))
# aten/src/ATen/native/LossNLL.cpp, ``nll_loss_out_frame``
CPU.workspace("nll_loss_forward")(copy_contiguous(0, 1, 2))
# aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``masked_scatter__cpu``
CPU.workspace("masked_scatter", "masked_scatter_")(copy_operands(2))


@CPU.workspace("cumsum", "cumprod")
def _cumulative(call: OperatorCall) -> int:
    """aten/src/ATen/native/ReduceOps.cpp, ``impl_func_cum_ops``: the input in the result's type."""
    out = call.result
    return 0 if call.tensor(0).dtype == out.dtype else size_bytes(out)


@CPU.workspace("sort", "sort.stable")
def _sort(call: OperatorCall) -> int:
    """aten/src/ATen/native/Sorting.cpp, ``sort_stable_out``: the initial indices."""
    x = call.tensor(0)
    found = call.args[-1] if len(call.args) > 1 else call.kwargs.get("dim", -1)
    dim = found if isinstance(found, int) and not isinstance(found, bool) else -1
    return x.shape[dim] * _INDEX_BYTES if x.dim() else 0


@CPU.workspace("index_select")
def _index_select(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``index_select_out_cpu_`` and ``index_select_out_cpu_dim1_``."""
    x, dim, index = call.tensor(0), int(str(call.args[1])), call.tensor(2)
    is_second = x.dim() > 1 and dim % x.dim() == 1
    copied_bytes = 0 if index.is_contiguous() else size_bytes(index)
    return copied_bytes + (size_bytes(x) if is_second and not x.is_contiguous() else 0)


@CPU.workspace("masked_select")
def _masked_select(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_select_out_impl_cpu``."""
    found = call.result_bytes
    return _select_bytes(call.tensor(0), call.tensor(1), found) - found


def _select_bytes(x: Tensor, mask: Tensor, found_bytes: int) -> int:
    """The mask is counted; then, unless one thread serves, it and its sums become indices."""
    count = math.prod(broadcast_sizes(x, mask))
    trace = PeakTrace()
    counting = (count + 1) * _INDEX_BYTES + two_pass_bytes(count, 1, _INDEX_BYTES)
    trace.free(trace.allocate(counting))
    trace.allocate(found_bytes)
    few = x.numel() < GRAIN_SIZE or torch.get_num_threads() == 1
    if not (few and x.is_contiguous() and mask.is_contiguous()):
        trace.allocate(2 * count * _INDEX_BYTES)
    return trace.peak_bytes


@CPU.workspace("masked_scatter_backward")
def _masked_scatter_backward(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``masked_scatter_backward_symint``.

    ``masked_select``, of which all is taken to be selected.
    """
    grad = call.tensor(0)
    joined = size_bytes(grad) + call.result_bytes
    selecting = _select_bytes(grad, call.tensor(1), size_bytes(grad))
    return max(joined, selecting) - call.result_bytes


@CPU.workspace("index.Tensor")
def _index(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``index_out``; IndexingUtils.h, ``expandTensors``.

    A mask becomes the positions of the elements that it selects, as many as the result has.
    """
    return _positions_bytes(call.args[1], call.tensor(0), call.result)


@CPU.workspace("index_put", "index_put_", "_index_put_impl_")
def _index_put(call: OperatorCall) -> int:
    """TensorAdvancedIndexing.cpp, ``_index_put_impl_``: masks become positions.

    A single value fills the selected elements instead.
    """
    values, accumulates = call.tensor(2), call.get(3, "accumulate") is True
    if values.numel() == 1 and not accumulates:
        return 0
    return _positions_bytes(call.args[1], call.tensor(0), values)


def _positions_bytes(indices: Sequence[object], x: Tensor, selected: Tensor) -> int:
    """Bytes of the positions that masks and shorter integers among the indices turn into.

    Where the values do not tell how many a mask selects, all are taken to be.
    """
    taken = {at: index for at, index in enumerate(indices) if isinstance(index, Tensor)}
    masks = [index for index in taken.values() if _is_mask(index)]
    short = sum(i.numel() for i in taken.values() if not _is_mask(i) and i.dtype != torch.int64)
    if not masks:
        return short * _INDEX_BYTES
    first, last = min(taken), max(taken)
    lead = first if last - first + 1 == len(taken) else 0
    indexed = sum(index.dim() if _is_mask(index) else 1 for index in taken.values())
    tells = selected.dim() > x.dim() - indexed
    counts = (selected.shape[lead] if tells else mask.numel() for mask in masks)
    found = sum(count * mask.dim() for count, mask in zip(counts, masks, strict=True))
    return (found + short) * _INDEX_BYTES


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)

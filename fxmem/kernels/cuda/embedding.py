"""Embeddings on CUDA, and bags of them: gradients by sorted indices.

Source: ``aten/src/ATen/native/cuda/Embedding.cu``, ``EmbeddingBag.cu`` and
``EmbeddingBackwardKernel.cu``. More than 3072 indices are sorted, rows of the gradient that go to
one weight are added up ten at a time, and these sums once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.cuda.layouts import accumulate_type, reshape_bytes
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import BlockTrace, dense_bytes

_MAX_MODE = 2
_UNSORTED = 3072
_ROWS_BY_THREAD = 10
_WARP = 32
_MAX_BLOCK = 1024
_FUSED_BLOCKS = 4
_LONG_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a gradient that go to weights."""

    grad: Tensor  # the gradient, a row for each index or each bag
    indices: Tensor  # the weight of each row
    weights: int  # how many weights there are
    by_frequency: bool  # whether rows are divided by how often their weight occurs
    in_bags: bool  # whether a row stands for several indices


@CUDA.workspace("embedding")
def _embedding(call: OperatorCall) -> int:
    """aten/src/ATen/native/Embedding.cpp, ``embedding_symint``: ``indices.reshape(-1)``."""
    return reshape_bytes(call.tensor(1), call.tensor(1).dim())


@CUDA.workspace("embedding_dense_backward")
def _dense_backward(call: OperatorCall) -> Blocks:
    """Embedding.cu, ``embedding_dense_backward_cuda``: dense operands; more than few are sorted."""
    grad, indices = call.tensor(0), call.tensor(1)
    trace = BlockTrace()
    trace.allocate(dense_bytes(grad))
    trace.allocate(dense_bytes(indices))
    by_frequency = call.get(4, "scale_grad_by_freq") is True
    if indices.numel() > _UNSORTED or by_frequency:
        _add_sorted(trace, _Rows(grad, indices, call.result.shape[0], by_frequency, in_bags=False))
    return trace.finish()


@CUDA.workspace("_embedding_bag_backward")
def _bag_backward(call: OperatorCall) -> Blocks:
    """EmbeddingBag.cu, ``_embedding_bag_dense_backward_cuda``: the same, whatever the number."""
    grad, indices = call.tensor(0), call.tensor(1)
    trace = BlockTrace()
    trace.allocate(dense_bytes(grad))
    if call.args[8] != _MAX_MODE and indices.numel():
        trace.allocate(dense_bytes(indices))
        by_frequency = call.args[7] is True
        _add_sorted(trace, _Rows(grad, indices, call.result.shape[0], by_frequency, in_bags=True))
    return trace.finish()


def _add_sorted(trace: BlockTrace, rows: _Rows) -> None:
    """Indices in order, with where they were; then ``embedding_backward_cuda_kernel``."""
    count, itemsize = rows.indices.numel(), rows.indices.element_size()
    for _ in ("indices", "places"):
        trace.allocate(count * itemsize)
    trace.free(trace.allocate(count * itemsize + radix_sort_bytes(count, itemsize, itemsize)))
    if rows.by_frequency:
        trace.allocate(count * itemsize)
        trace.free(trace.allocate(scan_bytes(count, itemsize)))
    trace.allocate_result()
    _add_segments(trace, rows)


def _add_segments(trace: BlockTrace, rows: _Rows) -> None:
    """``embedding_backward_cuda_kernel``: where weights begin, their parts, the sums of parts."""
    count, itemsize = rows.indices.numel(), rows.indices.element_size()
    trace.allocate(count * itemsize + _LONG_BYTES)
    trace.free(trace.allocate(count * itemsize + scan_bytes(count, itemsize)))
    segments = min(count, rows.weights)
    for _ in ("parts by segment", "first parts"):
        trace.allocate(segments * itemsize)
    trace.free(trace.allocate(scan_bytes(segments, itemsize)))
    parts = count // _ROWS_BY_THREAD + segments
    trace.allocate(_LONG_BYTES + parts * itemsize)
    wide, width = accumulate_type(rows.grad.dtype), rows.grad.shape[-1]
    if not _is_fused(rows, segments, parts):
        trace.allocate(parts * width * wide.itemsize)
        return
    trace.allocate(parts * itemsize)
    if rows.grad.dtype != wide:
        trace.allocate(rows.weights * width * wide.itemsize)


def _is_fused(rows: _Rows, segments: int, parts: int) -> bool:
    """``use_fused_kernel``: parts are added to the weights' gradients at once, if those are few."""
    if rows.in_bags or torch.are_deterministic_algorithms_enabled():
        return False
    width = -(-rows.grad.shape[-1] // _WARP) * _WARP
    blocks = -(-segments * width // min(width, _MAX_BLOCK))
    return blocks < current_gpu().multiprocessors * _FUSED_BLOCKS and parts > 4 * blocks


@CUDA.kernel("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    """EmbeddingBag.cu, ``_embedding_bag_cuda``: bags, the bag of each index, sizes, maxima."""
    weight, indices, offsets = args[:3]
    if not is_on_gpu(weight):
        return NotImplemented
    call = OperatorCall(args, kwargs)
    last = call.get(7, "include_last_offset") is True
    shape = (offsets.shape[0] - last, weight.shape[1])
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    make = indices.new_empty(0, dtype=dtype).new_empty
    has_maxima = call.get(4, "mode") == _MAX_MODE
    maxima = make(shape if has_maxima else (0,))
    return weight.new_empty(shape), make(indices.shape[0]), make(offsets.shape), maxima

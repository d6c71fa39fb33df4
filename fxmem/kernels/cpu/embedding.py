"""Bags of embeddings on the CPU (aten/src/ATen/native/EmbeddingBag.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.registry import CPU, OperatorCall, as_tensor, storage_bytes
from fxmem.kernels.workspace import PeakTrace, dense_bytes, size_bytes

_SUM, _MEAN, _MAX = 0, 1, 2
_REDUCED = (torch.float16, torch.bfloat16)
# A Python number becomes a tensor of 8 bytes; ``nonzero`` and ``sort`` answer in int64.
_LONG_BYTES = 8
_FLOAT_BYTES = 4


class _BagCall:
    def __init__(self, call: OperatorCall) -> None:
        self.weight, self.indices, self.offsets = (as_tensor(value) for value in call.args[:3])
        self.mode = call.get(4, "mode") or _SUM
        self.weights: Any = call.get(6, "per_sample_weights")
        last = call.get(7, "include_last_offset") is True
        padding = call.get(8, "padding_idx")
        self.bags = self.offsets.shape[0] - last
        self.dtype = torch.promote_types(self.indices.dtype, self.offsets.dtype)
        self.is_fast = (
            (self.weight.dtype in _REDUCED or self.weight.dtype == torch.float32)
            and self.weight.stride(1) == 1
            and (not isinstance(self.weights, Tensor) or self.weights.stride(0) == 1)
            and (padding is None or int(str(padding)) < 0)
        )
        self.has_map = self.mode != _SUM or not self.is_fast


@CPU.kernel("_embedding_bag")
def embedding_bag(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_embedding_bag_cpu_impl``: vectors are resized after they were allocated larger."""
    return _make_outputs(_BagCall(OperatorCall(args, kwargs)), requires_grad=True)


@CPU.kernel("_embedding_bag_forward_only")
def embedding_bag_forward_only(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_embedding_bag_forward_only_cpu``: sums count no bags."""
    return _make_outputs(_BagCall(OperatorCall(args, kwargs)), requires_grad=False)


def _make_outputs(call: _BagCall, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bags, the bag of each index, the bags' sizes and their maxima's indices."""
    features = call.weight.shape[1]
    indices, offsets = (
        x.new_empty(0, dtype=call.dtype).new_empty for x in (call.indices, call.offsets)
    )
    count = call.indices.shape[0]
    bag_of = offsets(count + 1).as_strided((count,), (1,)) if call.has_map else offsets(0)
    sizes = offsets(call.offsets.shape[0])
    if requires_grad or call.mode != _SUM:
        sizes = sizes.as_strided((call.bags,), (1,))
    maxima = indices((call.bags, features) if call.mode == _MAX else sizes.shape)
    return call.weight.new_empty(call.bags, features), bag_of, sizes, maxima


def _map_bytes(trace: PeakTrace, indices: int, bags: int, itemsize: int) -> int:
    """``make_offset2bag``: ones to add, a number to subtract, and the sums beside the counts."""
    counts = trace.allocate((indices + 1) * itemsize)
    trace.free(trace.allocate(bags * itemsize))
    wrapped = _LONG_BYTES + (0 if itemsize == _LONG_BYTES else itemsize)
    trace.free(trace.allocate(wrapped))
    sums = trace.allocate((indices + 1) * itemsize)
    trace.free(counts)
    return sums


@CPU.workspace("_embedding_bag", "_embedding_bag_forward_only")
def _forward(call: OperatorCall) -> int:
    """``_embedding_bag_cpu_impl``; the kernels of fbgemm take nothing from the allocator."""
    out, bag_of, sizes, maxima = map(storage_bytes, call.outputs)
    bag = _BagCall(call)
    itemsize, bags = bag.dtype.itemsize, bag.bags
    trace = PeakTrace()
    for value in (bag.indices, bag.offsets):
        trace.allocate(value.numel() * itemsize if value.dtype != bag.dtype else 0)
    trace.allocate(out)
    if bag_of:
        _map_bytes(trace, bag.indices.numel(), bags, itemsize)
    trace.allocate(sizes)
    if call.get_result(2).shape[0] == bags and bags > 1:
        trace.free(trace.allocate((bags - 1) * itemsize))
    first = trace.allocate(call.get_result(2).numel() * itemsize)
    if bag.mode == _MAX:
        trace.allocate(maxima)
        trace.free(first)
    trace.free(trace.allocate(_sum_bytes(bag)))
    if bag.mode == _MEAN:  # ``apply_bag_size``: sizes of at least one, then in the output's type
        trace.allocate(bags * (2 * itemsize + bag.weight.element_size()))
    return trace.peak_bytes - out - bag_of - sizes - maxima


def _sum_bytes(call: _BagCall) -> int:
    """``index_select_add`` and ``index_select_scale_add``.

    The fast path takes contiguous weights, and the factors of reduced ones in float; the other
    one adds reduced types up in float.
    """
    is_reduced, is_weighted = call.weight.dtype in _REDUCED, isinstance(call.weights, Tensor)
    if call.mode == _MAX:
        return 0
    if call.is_fast:
        copied = 0 if call.weight.is_contiguous() else size_bytes(call.weight)
        return copied + is_reduced * is_weighted * call.indices.numel() * _FLOAT_BYTES
    return is_reduced * (call.bags + (not is_weighted)) * call.weight.shape[1] * _FLOAT_BYTES


@CPU.workspace("_embedding_bag_backward")
def _backward(call: OperatorCall) -> int:
    """``_embedding_bag_backward`` and ``_embedding_bag_dense_backward_cpu``.

    No bag is taken to be empty.
    """
    grad, indices, offsets, bag_of = (as_tensor(value) for value in call.args[:4])
    mode, weights = call.args[8], call.get(10, "per_sample_weights")
    itemsize, count = indices.element_size(), indices.numel()
    trace = PeakTrace()
    if count and not bag_of.numel():
        _map_bytes(trace, count, offsets.numel(), itemsize)
    trace.allocate(dense_bytes(grad))
    trace.allocate(size_bytes(call.result))
    if mode == _MAX:
        trace.allocate(size_bytes(call.tensor(5)))
        trace.allocate(size_bytes(grad) + grad.shape[0] * _LONG_BYTES)
    else:
        trace.allocate(count * (itemsize + _LONG_BYTES))
        trace.free(trace.allocate(count * _LONG_BYTES))
        trace.allocate(count * itemsize)
        trace.allocate(size_bytes(weights) if isinstance(weights, Tensor) else 0)
    return trace.peak_bytes - size_bytes(call.result)


@CPU.workspace("_embedding_bag_per_sample_weights_backward")
def _weights_backward(call: OperatorCall) -> int:
    """``_embedding_bag_per_sample_weights_backward_cpu_template``."""
    indices, offsets, bag_of = (as_tensor(value) for value in call.args[2:5])
    trace = PeakTrace()
    if indices.numel() and not bag_of.numel():
        _map_bytes(trace, indices.numel(), offsets.numel(), indices.element_size())
    return trace.peak_bytes

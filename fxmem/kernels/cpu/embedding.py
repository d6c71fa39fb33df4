"""Bags of embeddings on the CPU (aten/src/ATen/native/EmbeddingBag.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2
_REDUCED = (torch.float16, torch.bfloat16)
# A Python number becomes a tensor of 8 bytes; ``nonzero`` and ``sort`` answer in int64.
_LONG_BYTES = 8
_FLOAT_BYTES = 4


class _Call:
    """The arguments of a forward call, and the sizes that follow from them."""

    def __init__(self, args: Arguments, kwargs: Mapping[str, object]) -> None:
        self.weight, self.indices, self.offsets = (tensor(value) for value in args[:3])
        self.mode = argument(args, kwargs, 4, "mode") or _SUM
        self.weights = argument(args, kwargs, 6, "per_sample_weights")
        last = argument(args, kwargs, 7, "include_last_offset") is True
        padding = argument(args, kwargs, 8, "padding_idx")
        self.bags = self.offsets.shape[0] - last
        self.dtype = torch.promote_types(self.indices.dtype, self.offsets.dtype)
        self.is_fast = (
            (self.weight.dtype in _REDUCED or self.weight.dtype == torch.float32)
            and self.weight.stride(1) == 1
            and (not isinstance(self.weights, Tensor) or self.weights.stride(0) == 1)
            and (padding is None or int(str(padding)) < 0)
        )
        self.has_map = self.mode != _SUM or not self.is_fast


@CPU.kernel(_aten._embedding_bag.default)
def embedding_bag(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_embedding_bag_cpu_impl``: vectors are resized after they were allocated larger."""
    return _make_outputs(_Call(args, kwargs), requires_grad=True)


@CPU.kernel(_aten._embedding_bag_forward_only.default)
def embedding_bag_forward_only(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_embedding_bag_forward_only_cpu``: sums count no bags."""
    return _make_outputs(_Call(args, kwargs), requires_grad=False)


def _make_outputs(call: _Call, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _map_bytes(tape: Tape, indices: int, bags: int, itemsize: int) -> int:
    """``make_offset2bag``: ones to add, a number to subtract, and the sums beside the counts."""
    counts = tape.allocate((indices + 1) * itemsize)
    tape.free(tape.allocate(bags * itemsize))
    wrapped = _LONG_BYTES + (0 if itemsize == _LONG_BYTES else itemsize)
    tape.free(tape.allocate(wrapped))
    sums = tape.allocate((indices + 1) * itemsize)
    tape.free(counts)
    return sums


@CPU.workspace(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def _forward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_embedding_bag_cpu_impl``; the kernels of fbgemm take nothing from the allocator."""
    assert isinstance(outputs, (tuple, list))
    out, bag_of, sizes, maxima = map(new_bytes, outputs)
    call = _Call(args, kwargs)
    itemsize, bags = call.dtype.itemsize, call.bags
    tape = Tape()
    for value in (call.indices, call.offsets):
        tape.allocate(value.numel() * itemsize if value.dtype != call.dtype else 0)
    tape.allocate(out)
    if bag_of:
        _map_bytes(tape, call.indices.numel(), bags, itemsize)
    tape.allocate(sizes)
    if tensor(outputs[2]).shape[0] == bags and bags > 1:
        tape.free(tape.allocate((bags - 1) * itemsize))
    first = tape.allocate(tensor(outputs[2]).numel() * itemsize)
    if call.mode == _MAX:
        tape.allocate(maxima)
        tape.free(first)
    tape.free(tape.allocate(_sum_bytes(call)))
    if call.mode == _MEAN:  # ``apply_bag_size``: sizes of at least one, then in the output's type
        tape.allocate(bags * (2 * itemsize + call.weight.element_size()))
    return tape.peak_bytes - out - bag_of - sizes - maxima


def _sum_bytes(call: _Call) -> int:
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


@CPU.workspace(_aten._embedding_bag_backward.default)
def _backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_embedding_bag_backward`` and ``_embedding_bag_dense_backward_cpu``.

    No bag is taken to be empty.
    """
    grad, indices, offsets, bag_of = (tensor(value) for value in args[:4])
    mode, weights = args[8], argument(args, kwargs, 10, "per_sample_weights")
    itemsize, count = indices.element_size(), indices.numel()
    tape = Tape()
    if count and not bag_of.numel():
        _map_bytes(tape, count, offsets.numel(), itemsize)
    tape.allocate(0 if grad.is_contiguous() else size_bytes(grad))
    tape.allocate(size_bytes(tensor(outputs)))
    if mode == _MAX:
        tape.allocate(size_bytes(tensor(args[5])))
        tape.allocate(size_bytes(grad) + grad.shape[0] * _LONG_BYTES)
    else:
        tape.allocate(count * (itemsize + _LONG_BYTES))
        tape.free(tape.allocate(count * _LONG_BYTES))
        tape.allocate(count * itemsize)
        tape.allocate(size_bytes(weights) if isinstance(weights, Tensor) else 0)
    return tape.peak_bytes - size_bytes(tensor(outputs))


@CPU.workspace(_aten._embedding_bag_per_sample_weights_backward.default)
def _weights_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_embedding_bag_per_sample_weights_backward_cpu_template``."""
    indices, offsets, bag_of = (tensor(value) for value in args[2:5])
    tape = Tape()
    if indices.numel() and not bag_of.numel():
        _map_bytes(tape, indices.numel(), offsets.numel(), indices.element_size())
    return tape.peak_bytes

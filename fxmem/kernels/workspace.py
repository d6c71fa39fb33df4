"""Allocations and frees inside one kernel, and sizes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from fxmem.graph import Blocks


class PeakTrace:
    """Allocations and frees of one kernel, in its order; remembers the highest point."""

    __slots__ = ("live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> int:
        """Allocate; returns the size, for the matching ``free``."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return size_bytes

    def free(self, *sizes_bytes: int) -> None:
        """Free what was allocated."""
        self.live_bytes -= sum(sizes_bytes)


class BlockTrace:
    """The blocks of one kernel, each with a number, in the order in which it takes and frees them.

    A block of no bytes is none; it has a number all the same.
    """

    __slots__ = ("_count", "_events", "_live")

    def __init__(self) -> None:
        self._count = 0
        self._events: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        """Takes a block; its number, for the matching ``free``."""
        block, self._count = self._count, self._count + 1
        if size_bytes:
            self._live[block] = size_bytes
            self._events.append((block, size_bytes))
        return block

    def allocate_result(self, index: int = 0) -> None:
        """Allocates that tensor of the operator's result."""
        self._events.append((~index, 0))

    def free(self, *blocks: int) -> None:
        """Frees blocks, in that order."""
        for block in blocks:
            if size_bytes := self._live.pop(block, 0):
                self._events.append((block, -size_bytes))

    def finish(self) -> Blocks:
        """Frees the rest, the last one first, as C++ ends the lives of variables; all events."""
        self.free(*reversed(list(self._live)))
        return tuple(self._events)


def is_like_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Tells whether ``Tensor.suggest_memory_format`` answers channels last, in 4 or 5 dimensions.

    c10/core/MemoryFormat.h, ``is_channels_last_strides_2d_s4`` and ``..._3d_s5``: strides must
    not decrease in the order C, W, H, (D,) N; ambiguous ones count as contiguous.
    """
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(sizes))
    if order is None or strides[1] == 0:
        return False
    least = 0
    for dim in order:
        if sizes[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False
        least = strides[dim]
        if sizes[dim] > 1:
            least *= sizes[dim]
    return True


def broadcast_sizes(*tensors: Tensor) -> tuple[int, ...]:
    """The sizes that tensors have together."""
    shapes = [reversed(x.shape) for x in tensors]
    sizes = zip_longest(*shapes, fillvalue=1)
    return tuple(0 if 0 in size else max(size) for size in sizes)[::-1]


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor with this one's shape and type."""
    return tensor.numel() * tensor.element_size()


def is_dense_in(x: Tensor, memory_format: torch.memory_format) -> bool:
    """Tells whether a tensor is contiguous in a format, and has its number of dimensions."""
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format, x.dim())
    return x.dim() == rank and x.is_contiguous(memory_format=memory_format)


def dense_bytes(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes that ``contiguous`` copies."""
    return 0 if is_dense_in(x, memory_format) else size_bytes(x)

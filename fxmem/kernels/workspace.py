"""Allocations and frees inside one kernel, and sizes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.graph import Blocks
from fxmem.kernels.registry import Estimator, OperatorCall, as_tensor


class PeakTrace:
    """Allocations and frees of one kernel, in its order; remembers the highest point."""

    __slots__ = ("live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> int:
        """Allocates; returns the size, for the matching ``free``."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return size_bytes

    def free(self, *sizes_bytes: int) -> None:
        """Frees allocations."""
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


def broadcast_sizes(*tensors: Tensor) -> tuple[int, ...]:
    """The sizes that tensors have together."""
    shapes = [reversed(x.shape) for x in tensors]
    sizes = zip_longest(*shapes, fillvalue=1)
    return tuple(0 if 0 in size else max(size) for size in sizes)[::-1]


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor with this one's shape and type."""
    return tensor.numel() * tensor.element_size()


def is_dense_in(x: Tensor, memory_format: torch.memory_format) -> bool:
    """Returns whether a tensor is contiguous in a format, and has its number of dimensions."""
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format, x.dim())
    return x.dim() == rank and x.is_contiguous(memory_format=memory_format)


def dense_bytes(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes that ``contiguous`` copies."""
    return 0 if is_dense_in(x, memory_format) else size_bytes(x)


RESULT = "result"
"""Stands for the results of an operator among its operands."""


def copy_operands(*operands: int | str, like: int | str | None = None) -> Estimator:
    """Makes the rule of a kernel that copies the operands that are not dense in its format.

    Args:
        operands: Positions among the arguments, or :data:`RESULT`; only tensors count.
        like: The operand whose strides suggest the format; None for a contiguous one.
    """

    def list_tensors(call: OperatorCall, operand: int | str) -> list[Tensor]:
        found = call.outputs if operand == RESULT else call.args[int(operand)]
        values = found if isinstance(found, (list, tuple)) else [found]
        return [value for value in values if isinstance(value, Tensor)]

    def estimate(call: OperatorCall) -> int:
        memory_format = torch.contiguous_format
        if like is not None:
            memory_format = suggest_memory_format(as_tensor(list_tensors(call, like)[0]))
        copied = (x for operand in operands for x in list_tensors(call, operand))
        return sum(dense_bytes(x, memory_format) for x in copied)

    return estimate


def measure_product(first: int, measure: Callable[[Tensor, Tensor], int]) -> Estimator:
    """Makes the rule of a product, of the argument at a position and the next one."""
    return lambda call: measure(call.tensor(first), call.tensor(first + 1))

"""What ``TensorIterator`` makes of a reduction: dimensions in order, merged where they can be.

Source: ``aten/src/ATen/TensorIterator.cpp``, ``aten/src/ATen/native/ReduceOpsUtils.h``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

_MAX_OFFSET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """The iteration over one input and its reduced output.

    Dimensions go from the fastest to the slowest, the reduced ones before the others.

    Attributes:
        sizes: By dimension.
        output_strides: In bytes; 0 where the dimension is reduced.
        input_strides: In bytes.
        output_itemsize: Bytes of an output element.
        input_itemsize: Bytes of an input element.
        input_offset: Elements before the input's first one, in its storage.
    """

    sizes: tuple[int, ...]
    output_strides: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_itemsize: int
    input_itemsize: int
    input_offset: int = 0

    @property
    def element_count(self) -> int:
        """``numel``."""
        return math.prod(self.sizes)

    @property
    def output_count(self) -> int:
        """``num_output_elements``."""
        return math.prod(
            size
            for size, stride in zip(self.sizes, self.output_strides, strict=True)
            if stride or not size
        )

    @property
    def reduced_dims(self) -> int:
        """``num_reduce_dims``."""
        return sum(stride == 0 for stride in self.output_strides)

    @property
    def is_along_fastest(self) -> bool:
        """``reduction_on_fastest_striding_dimension``."""
        reduced = self.reduced_dims
        if reduced == len(self.sizes):
            return True
        return self.input_strides[0] < self.input_strides[reduced]

    @property
    def fastest_stride(self) -> int:
        """``fastest_moving_stride``."""
        if not self.sizes:
            return self.input_itemsize
        return self.input_strides[0 if self.is_along_fastest else self.reduced_dims]

    @property
    def output_span(self) -> int:
        """Elements of the output up to the end of its longest dimension."""
        spans = (n * s for n, s in zip(self.sizes, self.output_strides, strict=True))
        return max((self.output_itemsize, *spans)) // self.output_itemsize

    @property
    def fits_32_bits(self) -> bool:
        """``can_use_32bit_indexing``."""
        if self.element_count > _MAX_OFFSET:
            return False
        return all(
            1 + sum((n - 1) * s for n, s in zip(self.sizes, strides, strict=True)) <= _MAX_OFFSET
            for strides in (self.output_strides, self.input_strides)
        )

    def split(self) -> Iterator[Reduction]:
        """``with_32bit_indexing``: halves along the longest dimension, until they fit."""
        if self.fits_32_bits:
            yield self
            return
        dim = self._find_split()
        first = self.sizes[dim] // 2
        for start, size in ((0, first), (first, self.sizes[dim] - first)):
            sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
            offset = start * self.input_strides[dim] // self.input_itemsize
            yield from replace(self, sizes=sizes, input_offset=self.input_offset + offset).split()

    def _find_split(self) -> int:
        """``get_dim_to_split``: of the longest extent, the slower one of equals."""
        return max(
            reversed(range(len(self.sizes))),
            key=lambda dim: (
                (self.sizes[dim] - 1) * max(self.output_strides[dim], self.input_strides[dim])
            ),
        )


def make_reduction(
    sizes: Sequence[int],
    strides: Sequence[int],
    dims: Collection[int],
    keepdim: bool,
    itemsizes: tuple[int, int],
    offset: int = 0,
) -> Reduction:
    """The iteration of a reduction into a contiguous output.

    Args:
        sizes: Of the input.
        strides: Of the input, in elements.
        dims: That are reduced, none of them negative; none for all.
        keepdim: Whether the output keeps them.
        itemsizes: Bytes of an element of the output and of the input.
        offset: The input's ``storage_offset``.
    """
    reduced = set(dims or range(len(sizes)))
    kept = [1 if dim in reduced else size for dim, size in enumerate(sizes)]
    outputs, step = [0] * len(sizes), itemsizes[0]
    for dim in reversed(range(len(sizes))):
        if dim not in reduced or (keepdim and sizes[dim] == 1):  # nothing to broadcast
            outputs[dim] = step
        step *= max(kept[dim], 1)
    inputs = [stride * itemsizes[1] for stride in strides]
    order = _sort(sizes, outputs, inputs)
    merged = _merge([(sizes[dim], outputs[dim], inputs[dim]) for dim in order])
    return Reduction(
        tuple(size for size, _, _ in merged),
        tuple(stride for _, stride, _ in merged),
        tuple(stride for _, _, stride in merged),
        *itemsizes,
        offset,
    )


def _sort(sizes: Sequence[int], outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
    """``reorder_dimensions``: an insertion sort that ambiguous comparisons do not stop."""
    order = list(reversed(range(len(sizes))))
    for i in range(1, len(order)):
        at = i
        for before in reversed(range(i)):
            comparison = _compare(order[before], order[at], sizes, outputs, inputs)
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return order


def _compare(
    dim0: int, dim1: int, sizes: Sequence[int], outputs: Sequence[int], inputs: Sequence[int]
) -> int:
    """``should_swap``: 1 where ``dim0`` is to come after ``dim1``, -1 where before it."""
    if (outputs[dim0] == 0) != (outputs[dim1] == 0):
        return 1 if outputs[dim1] == 0 else -1
    for strides in (outputs, inputs):
        if strides[dim0] == 0 or strides[dim1] == 0:
            continue
        if strides[dim0] != strides[dim1]:
            return -1 if strides[dim0] < strides[dim1] else 1
        if sizes[dim0] > sizes[dim1]:
            return 1
    return 0


def _merge(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """``coalesce_dimensions``: of size, stride of the output and stride of the input."""
    merged = dims[:1]
    for size, *strides in dims[1:]:
        last_size, *last_strides = merged[-1]
        if last_size == 1:
            merged[-1] = (size, strides[0], strides[1])
        elif size == 1 or all(
            last_size * a == b for a, b in zip(last_strides, strides, strict=True)
        ):
            merged[-1] = (last_size * size, last_strides[0], last_strides[1])
        else:
            merged.append((size, strides[0], strides[1]))
    return merged

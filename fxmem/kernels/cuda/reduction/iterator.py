"""Iteration of a reduction (``TensorIterator``: dimensions in order, merged) and its buffers.

Source: ``aten/src/ATen/TensorIterator.cpp``, ``aten/src/ATen/native/ReduceOpsUtils.h``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fxmem.kernels.cuda.gpu import current_gpu
from fxmem.kernels.workspace import BlockTrace

_MAX_OFFSET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """The iteration over one input and its reduced output.

    Dimensions go from the fastest to the slowest, the reduced ones before the others.
    """

    sizes: tuple[int, ...]  # by dimension
    output_strides: tuple[int, ...]  # in bytes; 0 where the dimension is reduced
    input_strides: tuple[int, ...]  # in bytes
    output_itemsize: int  # bytes of an output element
    input_itemsize: int  # bytes of an input element
    input_offset: int = 0  # elements before the input's first one, in its storage

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
    """Makes the iteration of a reduction into a contiguous output; no ``dims`` are all.

    Strides and the offset are the input's, in elements; itemsizes are the output's and the input's.
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


# -- Buffers of reductions --

_WARP = 32
_MIN_VALUES = 16
_MAX_VALUES = 256
_VECTORS_FROM = 128
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Kernel:
    """An instance of ``gpu_reduce_kernel``."""

    accumulator_bytes: int  # size of ``arg_t``, in which values are accumulated
    vector_size: int = 4  # ``input_vec_size``
    # whether accumulated values can wait in the output (``can_accumulate_in_output``)
    in_output: bool = True
    max_threads: int = 512  # ``mnt_wrapper::MAX_NUM_THREADS``


def take_reduction(trace: BlockTrace, iteration: Reduction, kernel: Kernel) -> None:
    """``gpu_reduce_kernel``: notes what it takes beside its results, and frees."""
    if iteration.element_count == 0:
        return
    if iteration.fits_32_bits:
        buffer, semaphores = map(trace.allocate, _size_buffers(iteration, kernel))
        trace.free(semaphores, buffer)
        return
    kept = 0
    if not kernel.in_output and kernel.accumulator_bytes > iteration.output_itemsize:
        kept = iteration.output_span * kernel.accumulator_bytes
    accumulated = trace.allocate(kept)
    for part in iteration.split():
        take_reduction(trace, part, kernel)
    trace.free(accumulated)


def _size_buffers(iteration: Reduction, kernel: Kernel) -> tuple[int, int]:
    """``setReduceConfig``, ``global_memory_size`` and ``semaphore_size``."""
    outputs = iteration.output_count
    inputs = iteration.element_count // outputs
    along_input = iteration.is_along_fastest
    dim0, dim1 = (inputs, outputs) if along_input else (outputs, inputs)
    output_vector = 1
    if iteration.fastest_stride == iteration.input_itemsize:
        if along_input and dim0 >= _VECTORS_FROM and iteration.reduced_dims == 1:
            dim0 //= kernel.vector_size
        elif not along_input:
            output_vector = _find_output_vector(iteration)
            dim0 //= output_vector
    width, height = _find_block(dim0, dim1, kernel.max_threads // output_vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    splits_warps = _ceil_div(inputs, step_input) >= min(height * 16, _MAX_VALUES)
    if splits_warps:
        step_input *= height
    else:
        step_output *= height
    grid = _ceil_div(outputs // output_vector, step_output)
    values = _ceil_div(inputs, step_input)
    blocks = _count_blocks(values, grid, width * height) if splits_warps else 1
    if blocks == 1:
        return 0, 0
    size = kernel.accumulator_bytes * outputs * blocks
    if not along_input:
        size *= width * output_vector
    return size, _SEMAPHORE_BYTES * grid


def _find_output_vector(iteration: Reduction) -> int:
    """``get_output_vec_size``: what divides offset, size and the other strides."""
    at = iteration.reduced_dims
    size = 4
    others = (s for dim, s in enumerate(iteration.input_strides) if dim != at)
    strides = (stride // iteration.input_itemsize for stride in others)
    for number in (iteration.input_offset, iteration.sizes[at], *strides):
        while number % size:
            size //= 2
    return size


def _find_block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    """``set_block_dimension``: width and height."""
    first = _floor_power(dim0) if dim0 < most else most
    second = _floor_power(dim1) if dim1 < most else most
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _count_blocks(values: int, grid: int, threads: int) -> int:
    """``ctas_per_output``, where threads have many values and blocks are few."""
    gpu = current_gpu()
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // threads)
    if values < _MAX_VALUES or grid > target:
        return 1
    wanted = min(_ceil_div(target, grid), _ceil_div(values, _MIN_VALUES))
    return max(wanted, _ceil_div(values, _MAX_VALUES))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _floor_power(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)

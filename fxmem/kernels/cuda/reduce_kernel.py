"""The buffers of CUDA's reductions, which ``sum``, ``mean``, ``max``, ``norm`` and others share.

Source: ``aten/src/ATen/native/cuda/Reduce.cuh``. Where a reduction has many inputs for few outputs,
several blocks work on the same output: each writes what it has accumulated to global memory, and
the last one, which a semaphore finds, adds it up. Each block gets room for all of its threads, so
that the gradient of a bias can take 100 MiB for a moment, whatever the size of the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.kernels.cuda.iterator import Reduction
from fxmem.kernels.cuda.target import current_gpu
from fxmem.kernels.tape import BlockTape

_WARP = 32
_MIN_VALUES = 16
_MAX_VALUES = 256
_VECTORS_FROM = 128
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Kernel:
    """An instance of ``gpu_reduce_kernel``.

    Attributes:
        accumulator_bytes: Size of ``arg_t``, in which values are accumulated.
        vector_size: ``input_vec_size``.
        in_output: Whether accumulated values can wait in the output (``can_accumulate_in_output``).
        max_threads: ``mnt_wrapper::MAX_NUM_THREADS``.
    """

    accumulator_bytes: int
    vector_size: int = 4
    in_output: bool = True
    max_threads: int = 512


def take_reduction(tape: BlockTape, iteration: Reduction, kernel: Kernel) -> None:
    """``gpu_reduce_kernel``: what it takes beside its results, and frees.

    Args:
        tape: Where it is noted.
        iteration: What is reduced.
        kernel: By which kernel.
    """
    if iteration.element_count == 0:
        return
    if iteration.fits_32_bits:
        buffer, semaphores = map(tape.allocate, _size_buffers(iteration, kernel))
        tape.free(semaphores, buffer)
        return
    kept = 0
    if not kernel.in_output and kernel.accumulator_bytes > iteration.output_itemsize:
        kept = iteration.output_span * kernel.accumulator_bytes
    accumulated = tape.allocate(kept)
    for part in iteration.split():
        take_reduction(tape, part, kernel)
    tape.free(accumulated)


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
    """The largest power of two up to a number, and 1 for none."""
    return 1 << max(number.bit_length() - 1, 0)

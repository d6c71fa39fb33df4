"""Reductions on CUDA, worked out by hand from ``Reduce.cuh``: on an A100, 108 multiprocessors.

Held also against the header itself, compiled with a real ``TensorIterator`` (40 000 cases of
sizes, strides, types and dimensions).
"""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, run_kernel, run_step, workspaces

from fxmem.graph import Blocks
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.reduction.iterator import Kernel, Reduction, make_reduction, take_reduction
from fxmem.kernels.workspace import BlockTrace

pytestmark = pytest.mark.usefixtures("gpu")

aten = torch.ops.aten


def test_the_gradient_of_a_bias_takes_a_place_for_each_thread() -> None:
    # (8192, 4096) over dimension 0: the outputs lie along the fastest dimension, 4 to a vector.
    # Threads: at most 512 / 4 = 128, as 32 x 4; 4096 / 4 / 32 = 32 blocks. Values by thread:
    # 8192 / 4 = 2048 >= 256, so blocks share outputs: 108 * 2048 / 128 = 1728 are wanted, hence
    # ceil(1728 / 32) = 54 for each. Bytes: 4 * 4096 * 54 * 32 * 4, and 32 semaphores of 4.
    expected = 4 * 4096 * 54 * 32 * 4 + 32 * 4
    assert estimate(aten.sum.dim_IntList, torch.empty(8192, 4096), [0], True) == expected
    assert estimate(aten.sum.dim_IntList, torch.empty(8, 1024, 4096), [0, 1]) == expected


def test_half_precision_accumulates_in_float() -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    expected = 4 * 4096 * 54 * 32 * 4 + 32 * 4  # likewise: the vector of outputs is of 4, too
    assert estimate(aten.sum.dim_IntList, x, [0], True) == expected


def test_with_few_rows_there_is_no_buffer() -> None:
    # 1020 / 4 = 255 values by thread.
    assert estimate(aten.sum.dim_IntList, torch.empty(1020, 4096), [0]) == 0
    assert estimate(aten.sum.dim_IntList, torch.empty(1024, 4096), [0]) > 0


def test_with_many_outputs_there_is_no_buffer() -> None:
    # 262144 / 4 / 32 = 2048 blocks, more than the 1728 that fit at a time.
    assert estimate(aten.sum.dim_IntList, torch.empty(1024, 262144), [0]) == 0


def test_a_whole_tensor() -> None:
    # 2^20 elements, 4 at a time: 512 threads in a row, 2048 values each. 108 * 2048 / 512 = 432
    # blocks fit, 2048 / 16 = 128 are worth it. A place for each block, and a semaphore.
    x = torch.empty(1024, 1024)
    assert estimate(aten.sum.default, x) == 128 * 4 + 4
    assert estimate(aten.mean.default, x) == 128 * 4 + 4
    assert estimate(aten.amax.default, x) == 128 * 4 + 4
    assert estimate(aten.linalg_vector_norm.default, x) == 128 * 4 + 4
    assert estimate(aten.argmax.default, x) == 128 * 16 + 4  # a value and its index
    # WelfordData: mean, sum of squares, count, and the count as a float.
    assert estimate(aten.var.correction, x) == 128 * 16 + 4
    assert estimate(aten.var.correction, x.double()) == 128 * 32 + 4
    assert estimate(aten.aminmax.default, x) == 128 * 8 + 4


def test_sums_of_half_precision_read_eight_at_a_time() -> None:
    # As above, with 2^10 elements: 2^10 / 8 = 128 threads; sum of 8 values is far from 256.
    # 2^17 elements: 512 threads, 256 values each; 432 or 256 / 16 = 16 blocks: 16.
    x = torch.empty(2**17, dtype=torch.float16)
    assert estimate(aten.sum.default, x) == 16 * 4 + 4
    # Of 2^16, vectors of 4 would give 512 threads 128 values, and so do vectors of 8.
    assert estimate(aten.sum.default, torch.empty(2**16, dtype=torch.float16)) == 0


def test_rows() -> None:
    # (8, 2^20) over the last dimension: 2^20 / 4 = 2^18 long; at most 512 threads, of which
    # height = min(8, 512 / 32) = 8 and width = min(512, 512 / 8) = 64. Values: 2^20 / 64 = 16384
    # >= 8 * 16, so rows share the block's height: 2048 values, and 8 blocks. 108 * 4 / 8 = 54
    # blocks by output. No place by thread: a block adds up before it writes.
    assert estimate(aten.sum.dim_IntList, torch.empty(8, 2**20), [1]) == 4 * 8 * 54 + 4 * 8


def test_a_small_gpu_has_small_buffers() -> None:
    # 46 multiprocessors of 1536 threads: 46 * 12 = 552 blocks of 128 threads, by 32: 18.
    with use_gpu(Gpu(multiprocessors=46, threads_per_multiprocessor=1536)):
        found = estimate(aten.sum.dim_IntList, torch.empty(8192, 4096), [0])
    assert found == 4 * 4096 * 18 * 32 * 4 + 32 * 4


def test_counts_are_sums_of_wide_copies() -> None:
    x = torch.empty(30, 40)
    assert estimate(aten.sum.default, x > 0) == 1200 * 8  # make_reduction_from_out_ty
    assert estimate(aten.sum.default, x, dtype=torch.float64) == 1200 * 8
    assert estimate(aten.sum.default, x.half(), dtype=torch.float32) == 0
    assert estimate(aten.any.default, x) == 0  # get_allany_iter: no cast


def test_extremes_of_all_want_contiguous_inputs() -> None:
    x = torch.empty(30, 40).t()
    assert estimate(aten.max.default, x) == 4800  # ReduceAllOps.cpp
    assert estimate(aten.argmax.default, x) == 4800
    assert estimate(aten.max.dim, x, 1) == 0


def test_logsumexp() -> None:
    # logsumexp_out_impl: the maxima, and the exponentials while they are added up.
    assert estimate(aten.logsumexp.default, torch.empty(30, 40), [1]) == 120 + 4800


def test_beyond_32_bits_it_goes_in_parts() -> None:
    # Twice 2^30 bytes and more: halves. In half precision accumulated values wait in a buffer.
    sizes = (2, 2**30)
    strides = (2**30, 1)
    split = make_reduction(sizes, strides, [1], False, (2, 2))
    assert not split.fits_32_bits
    parts = list(split.split())
    assert [part.sizes for part in parts] == [(2**30, 1), (2**30, 1)]
    kernel = Kernel(4, 8, in_output=False)
    first, second = ([nbytes for _, nbytes in take(part, kernel)] for part in parts)
    assert [nbytes for _, nbytes in take(split, kernel)] == [2 * 4, *first, *second, -2 * 4]
    in_output = Kernel(4, 8, in_output=True)
    assert [nbytes for _, nbytes in take(split, in_output)] == first + second


def take(iteration: Reduction, kernel: Kernel) -> Blocks:
    trace = BlockTrace()
    take_reduction(trace, iteration, kernel)
    return trace.finish()


def test_a_step_has_the_buffers_in_backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Sigmoid())
    with torch.device("cpu"):
        x = torch.zeros(4096, 16)
    # The gradient of 64 outputs: 16 vectors of 4, so 16 threads in a row and 8 of those; values:
    # 4096 / 8 = 512; 1 block, of 1728: 512 / 16 = 32 share. A step's own sums are smaller.
    assert workspaces(run_step(model, x))["aten.sum.dim_IntList"] == 4 * 64 * 32 * 16 * 4 + 4


def test_a_histogram_counts_integers_too() -> None:
    # Tokens by expert, as transformers' ``grouped_mm_experts_forward`` asks for them.
    ids = torch.empty(1024, 1024, dtype=torch.int32)
    counts, held = run_kernel(aten.histc.default, ids, 8, 0, 7)
    assert (counts.shape, counts.dtype, held) == ((8,), torch.int32, 0)
    # Without a range the extremes are found first: a pair for each of 128 blocks, as above.
    assert estimate(aten.histc.default, ids, 8) == 2 * 4 + 128 * 8 + 4
    assert estimate(aten.histc.default, ids[:0], 8) == 0

"""Reductions and losses on CUDA, worked out by hand on an A100: 108 multiprocessors.

Reductions were also held against ``Reduce.cuh`` itself, compiled with a real ``TensorIterator``
(40 000 cases of sizes, strides, types and dimensions).
"""

from __future__ import annotations

from typing import Any

import torch
from cuda_steps import estimate, made, make_buffers_test, on_gpu, run_kernel, run_step, workspaces
from torch import Tensor, nn

from fxmem.graph import Blocks, Phase
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.reduction.iterator import Kernel, Reduction, make_reduction, take_reduction
from fxmem.kernels.workspace import BlockTrace

aten = torch.ops.aten
F = nn.functional
F16, BF16, I64 = torch.float16, torch.bfloat16, torch.int64
NONE, MEAN = 0, 1
empty = torch.empty


def million() -> Tensor:
    return empty(1024, 1024)


# (8192, 4096) over dimension 0: the outputs lie along the fastest dimension, 4 to a vector.
# Threads: at most 512 / 4 = 128, as 32 x 4; 4096 / 4 / 32 = 32 blocks. Values by thread:
# 8192 / 4 = 2048 >= 256, so blocks share outputs: 108 * 2048 / 128 = 1728 are wanted, hence
# ceil(1728 / 32) = 54 for each. A place for each thread, and 32 semaphores.
BIAS = 4 * 4096 * 54 * 32 * 4 + 32 * 4
# 2^20 elements, 4 at a time: 512 threads in a row, 2048 values each. 108 * 2048 / 512 = 432
# blocks fit, 2048 / 16 = 128 are worth it. A place for each block, and a semaphore.
WHOLE = 128 * 4 + 4
REDUCTIONS = [
    ("sum.dim_IntList", lambda: (empty(8192, 4096), [0], True), BIAS),
    ("sum.dim_IntList", lambda: (empty(8, 1024, 4096), [0, 1]), BIAS),
    ("sum.dim_IntList", lambda: (empty(8192, 4096, dtype=BF16), [0], True), BIAS),  # in float
    # With few rows (1020 / 4 = 255 values by thread) there is no buffer, nor with many outputs:
    # 262144 / 4 / 32 = 2048 blocks, more than the 1728 that fit at a time.
    ("sum.dim_IntList", lambda: (empty(1020, 4096), [0]), 0),
    ("sum.dim_IntList", lambda: (empty(1024, 262144), [0]), 0),
    # Rows: 2^20 / 4 = 2^18 long; at most 512 threads, of which height = min(8, 512 / 32) = 8 and
    # width = min(512, 512 / 8) = 64. Values: 2^20 / 64 = 16384 >= 8 * 16, so rows share the
    # block's height: 2048 values, and 8 blocks. 108 * 4 / 8 = 54 blocks by output. No place by
    # thread: a block adds up before it writes.
    ("sum.dim_IntList", lambda: (empty(8, 2**20), [1]), 4 * 8 * 54 + 4 * 8),
    ("sum", lambda: (million(),), WHOLE),
    ("mean", lambda: (million(),), WHOLE),
    ("amax", lambda: (million(),), WHOLE),
    ("linalg_vector_norm", lambda: (million(),), WHOLE),
    ("argmax", lambda: (million(),), 128 * 16 + 4),  # a value and its index
    # WelfordData: mean, sum of squares, count, and the count as a float.
    ("var.correction", lambda: (million(),), 128 * 16 + 4),
    ("var.correction", lambda: (million().double(),), 128 * 32 + 4),
    ("aminmax", lambda: (million(),), 128 * 8 + 4),
    # Sums of halves read eight at a time: 2^17 elements are 256 values for each of 512 threads,
    # 256 / 16 = 16 blocks. Of 2^16, 128 values: no buffer.
    ("sum", lambda: (empty(2**17, dtype=F16),), 16 * 4 + 4),
    ("sum", lambda: (empty(2**16, dtype=F16),), 0),
    # make_reduction_from_out_ty: a cast copy; halves are cast by the kernel; get_allany_iter.
    ("sum", lambda: (empty(30, 40) > 0,), 1200 * 8),
    ("any", lambda: (empty(30, 40),), 0),
    # ReduceAllOps.cpp, argmax_argmin_impl: extremes of all want contiguous inputs.
    ("max", lambda: (empty(30, 40).t(),), 4800),
    ("argmax", lambda: (empty(30, 40).t(),), 4800),
    ("max.dim", lambda: (empty(30, 40).t(), 1), 0),
    # logsumexp_out_impl: the maxima, and the exponentials while they are added up.
    ("logsumexp", lambda: (empty(30, 40), [1]), 120 + 4800),
]


def image() -> Tensor:
    return empty(2, 3, 4, 4).to(memory_format=torch.channels_last)


def logits(*rest: Any) -> Any:
    return lambda: (empty(8, 4), empty(8, 4), *(x() if callable(x) else x for x in rest))


def labels(*sizes: int) -> Tensor:
    return empty(sizes, dtype=I64)


def ctc(*rest: object) -> Any:
    # Gradient, probabilities, targets, lengths, losses and sums of 4 sequences.
    return lambda: (
        empty(4), empty(50, 4, 20), labels(4, 10), [50] * 4, [10] * 4, empty(4),
        empty(4, 50, 21), 0, *rest,
    )  # fmt: skip


CTC = 4 * 50 * 21 * 4 + 3 * 8 * 4
LOSSES = [
    # Loss.cpp: the losses, and their reduction.
    ("mse_loss", lambda: (million(), million()), (4 << 20) + WHOLE),
    ("huber_loss", lambda: (million(), million()), (4 << 20) + WHOLE),
    ("mse_loss", logits(), 128),
    ("smooth_l1_loss", logits(NONE), 0),
    ("binary_cross_entropy", logits(), 4),  # the scalar that is copied
    # log_sigmoid and the loss; pos_weight - 1 and its product with the target beside the first.
    ("binary_cross_entropy_with_logits", logits(), 256),
    ("binary_cross_entropy_with_logits", logits(None, None, NONE), 128),
    ("binary_cross_entropy_with_logits", logits(None, lambda: empty(4)), 256 + 16 - 4),
    # Loss.cu, NLLLoss2d.cu: dense operands, but of losses that are not reduced.
    ("nll_loss_forward", lambda: (empty(10, 6).t(), labels(6), None, MEAN, -100), 240),
    ("nll_loss_forward", lambda: (empty(10, 6).t(), labels(6), None, NONE, -100), 0),
    ("nll_loss2d_forward", lambda: (image(), labels(2, 4, 4).mT, None, MEAN, -100), 384 + 32 * 8),
    # LossCTC.cu: lengths and offsets; backward the other sums, and where infinite losses count
    # nothing a mask of losses, a zero, and the gradient once more.
    ("_ctc_loss", lambda: (empty(50, 4, 20), labels(4, 10), [50] * 4, [10] * 4), 3 * 8 * 4),
    ("_ctc_loss_backward", ctc(), CTC),
    ("_ctc_loss_backward", ctc(True), CTC + 4 + 4 + 50 * 4 * 20 * 4),
]


test_buffers = make_buffers_test(REDUCTIONS + LOSSES)


def test_named_types_are_cast_to() -> None:
    with on_gpu():
        x = empty(30, 40)
        assert estimate(aten.sum.default, x, dtype=torch.float64) == 1200 * 8
        assert estimate(aten.sum.default, x.half(), dtype=torch.float32) == 0


def test_a_small_gpu_has_small_buffers() -> None:
    # 46 multiprocessors of 1536 threads: 46 * 12 = 552 blocks of 128 threads, by 32: 18.
    with on_gpu(), use_gpu(Gpu(multiprocessors=46, threads_per_multiprocessor=1536)):
        found = estimate(aten.sum.dim_IntList, empty(8192, 4096), [0])
    assert found == 4 * 4096 * 18 * 32 * 4 + 32 * 4


def take(iteration: Reduction, kernel: Kernel) -> Blocks:
    trace = BlockTrace()
    take_reduction(trace, iteration, kernel)
    return trace.finish()


def test_beyond_32_bits_it_goes_in_parts() -> None:
    # Twice 2^30 bytes and more: halves. In half precision accumulated values wait in a buffer.
    split = make_reduction((2, 2**30), (2**30, 1), [1], False, (2, 2))
    assert not split.fits_32_bits
    parts = list(split.split())
    assert [part.sizes for part in parts] == [(2**30, 1), (2**30, 1)]
    kernel = Kernel(4, 8, in_output=False)
    first, second = ([nbytes for _, nbytes in take(part, kernel)] for part in parts)
    assert [nbytes for _, nbytes in take(split, kernel)] == [2 * 4, *first, *second, -2 * 4]
    in_output = Kernel(4, 8, in_output=True)
    assert [nbytes for _, nbytes in take(split, in_output)] == first + second


def test_a_step_has_the_buffers_in_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid())
    # The gradient of 64 outputs: 16 vectors of 4, so 16 threads in a row and 8 of those; values:
    # 4096 / 8 = 512; 1 block, of 1728: 512 / 16 = 32 share. A step's own sums are smaller.
    found = workspaces(run_step(model, torch.zeros(4096, 16)))
    assert found["aten.sum.dim_IntList"] == 4 * 64 * 32 * 16 * 4 + 4


def test_results_in_larger_storages_and_of_other_types() -> None:
    with on_gpu():
        x, ids = empty(8, 4), empty(64, dtype=torch.int32)
        for operator in (aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy):
            result, _ = run_kernel(operator.default, x, x)
            assert result.shape == () and result.untyped_storage().nbytes() == 128
        # Tokens by expert, as transformers' ``grouped_mm_experts_forward`` asks for them.
        counts, held = run_kernel(aten.histc.default, ids, 8, 0, 7)
        assert (counts.shape, counts.dtype, held) == ((8,), torch.int32, 0)


def test_cross_entropy() -> None:
    target = torch.zeros(6, dtype=I64)
    graph = run_step(F.cross_entropy, torch.zeros(6, 10, requires_grad=True), target)
    assert made(graph) == [("_log_softmax", 240), ("nll_loss_forward", 8)]
    backward = [("nll_loss_backward", 240), ("_log_softmax_backward_data", 240)]
    assert made(graph, Phase.BACKWARD)[-2:] == backward

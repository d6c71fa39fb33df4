"""Normalization on CUDA: which kernel serves, what a step makes, and buffers inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import check_buffers, made, make_buffers_test, on_gpu, run_kernel, run_step, saved
from torch import Tensor, nn

from fxmem.graph import MemoryGraph, Phase
from fxmem.kernels.cuda.gpu import Gpu, use_gpu

aten = torch.ops.aten
F = nn.functional
LAST = torch.channels_last
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPE = (2, 8, 6, 6)
empty = torch.empty


def leaf(*sizes: int, dtype: torch.dtype = F32, last: bool = False) -> Tensor:
    x = torch.zeros(sizes or SHAPE, dtype=dtype)
    return (x.to(memory_format=LAST) if last else x).requires_grad_()


def norms(graph: MemoryGraph, *phases: Phase) -> list[tuple[str, int]]:
    return [entry for entry in made(graph, *phases) if "norm" in entry[0]]


def group_norm(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=BF16):
        return F.group_norm(x, 4, weight, weight)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=BF16):
        return F.rms_norm(x, [8], weight)


CUDNN, NATIVE, GROUP = "cudnn_batch_norm", "native_batch_norm", "native_group_norm"
LAYER, RMS = "native_layer_norm", "_fused_rms_norm"
HALF, ROWS, HALF_ROWS = leaf(dtype=BF16), leaf(2, 6, 8), leaf(2, 6, 8, dtype=BF16)
GAPS = torch.zeros(2, 6, 8, 6).transpose(1, 2)
MODELS: list[tuple[Any, tuple[Tensor, ...], list[tuple[str, int]], int | None]] = [
    # Normalization.cpp, _select_batch_norm_backend. cuDNN's: 576 elements, twice 8 floats of
    # the weight's type; backward as much, and gradients of weight and bias.
    (nn.BatchNorm2d(8), (leaf(),), [(CUDNN, 4 * 592)], 4 * 592),
    (nn.BatchNorm2d(8), (leaf(dtype=F16),), [(CUDNN, 2 * 576 + 64)], None),
    (nn.BatchNorm1d(8), (leaf(6, 8, 5),), [(CUDNN, 4 * (240 + 16))], None),
    (nn.BatchNorm3d(8), (leaf(2, 8, 3, 3, 3),), [(CUDNN, 4 * 448)], None),
    (nn.BatchNorm2d(8, track_running_stats=False), (leaf(),), [(CUDNN, 4 * 592)], None),
    (nn.SyncBatchNorm(8), (leaf(),), [(CUDNN, 4 * 592)], None),  # one process
    # Native: statistics in toAccumulateType.
    (nn.BatchNorm2d(8).to(F16), (leaf(dtype=F16),), [(NATIVE, 2 * 576 + 64)], None),
    (nn.BatchNorm2d(8), (HALF,), [(NATIVE, 2 * 576 + 64)], None),
    (nn.BatchNorm1d(8), (leaf(6, 8),), [(NATIVE, 4 * 64)], None),
    (nn.BatchNorm2d(8, affine=False), (leaf(),), [(NATIVE, 4 * 592)], None),
    # Inputs are made dense for cuDNN.
    (nn.BatchNorm2d(8), (GAPS,), [("clone", 4 * 576), (CUDNN, 4 * 592)], None),
    # instance_norm: one image of 2 * 8 channels, whose parameters are repeated.
    (
        nn.InstanceNorm2d(8, affine=True),
        (leaf(),),
        [("repeat", 64), ("repeat", 64), (CUDNN, 4 * 608)],
        None,
    ),
    (nn.InstanceNorm2d(8), (leaf(),), [(NATIVE, 4 * 608)], None),
    # group_norm_kernel.cu: statistics of (2, 4) in the input's type; scale and shift of (2, 8)
    # floats inside; backward two sums and a factor by channel, two by group, as floats.
    (
        nn.GroupNorm(4, 8).bfloat16(),
        (HALF,),
        [(GROUP, 2 * 576 + 2 * 16 + 2 * 64)],
        2 * (576 + 16) + 3 * 64 + 2 * 32,
    ),
    (nn.GroupNorm(4, 8), (leaf(last=True),), [("clone", 2304), (GROUP, 4 * 592 + 128)], None),
    # Autocast: to floats in channels last; those contiguous; then the kernel's result.
    (
        group_norm,
        (leaf(dtype=BF16, last=True), leaf(8)),
        [("_to_copy", 2304), ("clone", 2304), (GROUP, 4 * 592 + 128)],
        None,
    ),
    # layer_norm_kernel.cu: one statistic, in float.
    (nn.RMSNorm(8), (ROWS,), [(RMS, 384 + 48)], 2 * 384 + 32),
    (nn.RMSNorm(8).bfloat16(), (HALF_ROWS,), [(RMS, 192 + 48)], 2 * 192 + 16),
    (lambda x: F.rms_norm(x, [8]), (ROWS,), [(RMS, 384 + 48)], 2 * 384),
    (rms_norm, (HALF_ROWS, leaf(8)), [("_to_copy", 384), (RMS, 384 + 48)], None),
    # Backward beside its results: the gradient, made dense.
    (nn.LayerNorm(8).bfloat16(), (HALF_ROWS,), [(LAYER, 192 + 2 * 48)], 192 + 2 * 16 + 192),
]


@pytest.mark.parametrize(("model", "inputs", "forward", "backward"), MODELS)
def test_what_a_step_makes(
    model: Any, inputs: tuple[Tensor, ...], forward: list[tuple[str, int]], backward: int | None
) -> None:
    graph = run_step(model, *inputs)
    assert made(graph) == forward
    found = norms(graph, Phase.BACKWARD)
    assert backward is None or found == [(f"{forward[-1][0]}_backward", backward)]


def test_cudnn_can_be_switched_off_and_serves_inference() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert norms(run_step(nn.BatchNorm2d(8), leaf()))[0][0] == "native_batch_norm"
    graph = run_step(nn.BatchNorm2d(8), torch.zeros(SHAPE), mode="infer")
    assert norms(graph) == [("cudnn_batch_norm", 4 * 576)]


def test_frozen_statistics_under_gradients() -> None:
    weight, bias, mean, var = (torch.zeros(8, requires_grad=i < 2) for i in range(4))

    def function(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias)

    graph = run_step(function, leaf(), weight, bias, mean, var)
    assert norms(graph) == [("cudnn_batch_norm", 4 * 576)] and saved(graph) == []
    assert norms(graph, Phase.BACKWARD) == [("native_batch_norm_backward", 4 * 592)]


def test_running_statistics_of_images_are_averaged() -> None:
    graph = run_step(nn.InstanceNorm2d(8, track_running_stats=True), leaf())
    assert [entry for entry in made(graph) if entry[0] == "mean"] == [("mean", 32)] * 2


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("x", [leaf(dtype=BF16), leaf(last=True)])
def test_other_types_and_formats_of_rms_norm_take_several_kernels(x: Tensor) -> None:
    graph = run_step(lambda x, weight: F.rms_norm(x, [6], weight), x, leaf(6))
    assert "_fused_rms_norm" not in dict(made(graph))


# -- Buffers --


def batch_norm(
    *sizes: int, dtype: torch.dtype = F32, last: bool = False, train: bool = True
) -> Any:
    def make() -> tuple[Any, ...]:
        x, column = empty(sizes, dtype=dtype), empty(sizes[1])
        x = x.to(memory_format=LAST) if last else x
        return (x, *[column] * 4, train, 0.1, 1e-5)

    return make


def batch_norm_backward(*mask: bool, last: bool = True) -> Any:
    def make() -> tuple[Any, ...]:
        x, column = empty(MANY, dtype=BF16), empty(MANY[1])
        x = x.to(memory_format=LAST) if last else x
        return (x, x, *[column] * 5, True, 1e-5, list(mask))

    return make


def evaluation_backward() -> tuple[Any, ...]:
    x, column = empty(SHAPE).to(memory_format=LAST), empty(8)
    return (x, x, *[column] * 3, *[empty(0)] * 2, False, 1e-5, [True, False, False])


def layer_norm_backward(rows: int, weighted: bool = True) -> Any:
    def make() -> tuple[Any, ...]:
        x, column, statistic = empty(rows, 64), empty(64), empty(rows, 1)
        return (x, x, [64], statistic, statistic, column, column, [True, weighted, weighted])

    return make


def group_norm_backward(pixels: int, weighted: bool) -> Any:
    def make() -> tuple[Any, ...]:
        x, statistic = empty(2, 8, pixels), empty(2, 4)
        mask = [True, weighted, weighted]
        return (x, x, statistic, statistic, empty(8) if weighted else None, 2, 8, pixels, 4, mask)

    return make


def rms_norm_backward() -> tuple[Any, ...]:
    x = empty(1 << 17, 64)
    return (x, x, [64], empty(1 << 17, 1), empty(64), [True, True])


# Normalization.cuh, flexible_launch_configs. 100352 rows of 64: threads 32 x 16; 100352 / 256 =
# 392 blocks of rows, at most 128; two blocks of channels, each with a semaphore. Four sums of
# floats, in backward two.
STAGED = 64 * 128 * 4
# LaunchGammaBetaBackwardCUDAKernel: M = 2^17 rows of N = 64: two blocks of columns, of the 54 that
# half of the multiprocessors are; 2^17 / 32 = 4096 blocks of rows, at most 32768 / 2. Their sums,
# and while those of the weight are added up a new gradient of 64 and the buffer of a sum over
# (4096, 64): threads 16 x 8, 512 values each, 512 / 16 = 32 blocks: a place for each thread of a
# row and its vector of 4.
PARTIAL, SUMMED = 4096 * 64 * 4, 256 + 4 * 64 * 32 * 16 * 4 + 4
MANY = (32, 64, 56, 56)


BATCH_BACKWARD, LAYER_BACKWARD = f"{NATIVE}_backward", f"{LAYER}_backward"
BUFFERS = [
    (NATIVE, batch_norm(*MANY, dtype=BF16), 0),  # planes
    (NATIVE, batch_norm(*MANY, dtype=BF16, last=True), 4 * STAGED + 2 * 4),
    (NATIVE, batch_norm(*MANY, dtype=BF16, last=True, train=False), 0),
    # (4096, 512): 4096 / 256 = 16 blocks of rows, 512 / 32 of channels; of 1024 rows too few.
    (NATIVE, batch_norm(4096, 512), 4 * 512 * 16 * 4 + 16 * 4),
    (NATIVE, batch_norm(1024, 512), 0),
    (BATCH_BACKWARD, batch_norm_backward(True, True, True, last=False), 0),
    # The sums of 64 floats and the weight's gradients are there with the staged ones, but not
    # yet the input's gradient, which is larger.
    (BATCH_BACKWARD, batch_norm_backward(True, True, True), 2 * 256),
    (BATCH_BACKWARD, batch_norm_backward(False, True, True), 2 * 256 + 2 * STAGED + 2 * 4),
    # cuDNN's evaluation leaves the deviation to backward.
    (BATCH_BACKWARD, evaluation_backward, 32),
    (LAYER_BACKWARD, layer_norm_backward(1 << 16), 0),
    (LAYER_BACKWARD, layer_norm_backward(1 << 17), 2 * PARTIAL + SUMMED),
    (LAYER_BACKWARD, layer_norm_backward(1 << 17, weighted=False), 0),
    ("_fused_rms_norm_backward", rms_norm_backward, PARTIAL + SUMMED),
    # group_norm_kernel.cu: without parameters less; ds and db of (2, 8) are made for one
    # pixel, too, beside c2 and c3 of (2, 4).
    (GROUP, lambda: (empty(SHAPE), None, None, 2, 8, 36, 4, 1e-5), 0),
    (GROUP, lambda: (empty(2, 8), empty(8), empty(8), 2, 8, 1, 4, 1e-5), 0),
    (f"{GROUP}_backward", group_norm_backward(36, False), 2 * 64 + 2 * 32),
    (f"{GROUP}_backward", group_norm_backward(1, True), 2 * 64 + 2 * 32),
]


test_buffers = make_buffers_test(BUFFERS)


def test_few_multiprocessors_sum_no_rows_in_parts() -> None:
    with use_gpu(Gpu(multiprocessors=4)):  # 64 / 32 columns are enough for two
        check_buffers(LAYER_BACKWARD, layer_norm_backward(1 << 17), 0)


def test_statistics_in_evaluation_and_gradients_in_the_input_s_format() -> None:
    with on_gpu():
        x, column = empty(SHAPE, dtype=BF16), empty(8)
        forward = aten.native_batch_norm.default
        (_, *statistics), _ = run_kernel(forward, x, *[column] * 4, False, 0.1, 1e-5)
        assert [(y.shape, y.dtype) for y in statistics] == [((8,), F32)] * 2
        last = empty(SHAPE).to(memory_format=LAST)
        args = (last.contiguous(), last, *[column] * 5, True, 1e-5, [True] * 3)
        (grad, _, _), nbytes = run_kernel(aten.native_batch_norm_backward.default, *args)
        assert grad.is_contiguous(memory_format=LAST) and nbytes == 2 * 32

"""Batch normalization on CUDA: which backend serves, what it saves and what it holds inside."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, made, run_kernel, run_step, saved
from torch import Tensor, nn

from fxmem.graph import MemoryGraph, Phase

aten = torch.ops.aten
LAST = torch.channels_last


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, requires_grad=True)


def backend(graph: MemoryGraph, *phases: Phase) -> list[tuple[str, int]]:
    return [entry for entry in made(graph, *phases) if "norm" in entry[0]]


class TestBackend:
    """Normalization.cpp, ``_select_batch_norm_backend``."""

    def test_cudnn_saves_statistics_of_the_weight_s_type(self) -> None:
        graph = run_step(nn.BatchNorm2d(8), leaf(2, 8, 6, 6))
        # 576 floats and twice 8; backward: as much, and the gradients of weight and bias.
        assert backend(graph) == [("cudnn_batch_norm", 4 * 592)]
        assert saved(graph) == [((8,), "float32")] * 2
        assert backend(graph, Phase.BACKWARD) == [("cudnn_batch_norm_backward", 4 * 592)]

    def test_half_precision_with_a_float_weight(self) -> None:
        graph = run_step(nn.BatchNorm2d(8), leaf(2, 8, 6, 6, dtype=torch.float16))
        assert backend(graph) == [("cudnn_batch_norm", 2 * 576 + 4 * 16)]
        assert saved(graph) == [((8,), "float32")] * 2

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_throughout_is_native(self, dtype: torch.dtype) -> None:
        graph = run_step(nn.BatchNorm2d(8).to(dtype), leaf(2, 8, 6, 6, dtype=dtype))
        assert backend(graph) == [("native_batch_norm", 2 * 576 + 4 * 16)]
        assert saved(graph) == [((8,), "float32")] * 2  # toAccumulateType

    def test_bfloat16_is_native_whatever_the_weight(self) -> None:
        graph = run_step(nn.BatchNorm2d(8), leaf(2, 8, 6, 6, dtype=torch.bfloat16))
        assert backend(graph) == [("native_batch_norm", 2 * 576 + 4 * 16)]

    @pytest.mark.parametrize(
        ("model", "sizes"),
        [
            (nn.BatchNorm1d(8), (6, 8)),  # fewer than three dimensions
            (nn.BatchNorm2d(8, affine=False), (2, 8, 6, 6)),  # no weight
        ],
    )
    def test_what_else_is_native(self, model: nn.Module, sizes: tuple[int, ...]) -> None:
        assert backend(run_step(model, leaf(*sizes)))[0][0] == "native_batch_norm"

    @pytest.mark.parametrize(
        ("model", "sizes"),
        [
            (nn.BatchNorm1d(8), (6, 8, 5)),
            (nn.BatchNorm3d(8), (2, 8, 3, 3, 3)),
            (nn.BatchNorm2d(8, track_running_stats=False), (2, 8, 6, 6)),
            (nn.SyncBatchNorm(8), (2, 8, 6, 6)),  # in one process
        ],
    )
    def test_what_else_is_cudnn_s(self, model: nn.Module, sizes: tuple[int, ...]) -> None:
        assert backend(run_step(model, leaf(*sizes)))[0][0] == "cudnn_batch_norm"

    def test_cudnn_can_be_switched_off(self) -> None:
        with torch.backends.cudnn.flags(enabled=False):
            graph = run_step(nn.BatchNorm2d(8), leaf(2, 8, 6, 6))
        assert backend(graph)[0][0] == "native_batch_norm"

    def test_frozen_statistics_under_gradients(self) -> None:
        weight, bias, mean, var = (torch.zeros(8, requires_grad=i < 2) for i in range(4))

        def function(x: Tensor, *tensors: Tensor) -> Tensor:
            weight, bias, mean, var = tensors
            return nn.functional.batch_norm(x, mean, var, weight, bias)

        graph = run_step(function, leaf(2, 8, 6, 6), weight, bias, mean, var)
        assert backend(graph) == [("cudnn_batch_norm", 4 * 576)]
        assert saved(graph) == []
        assert backend(graph, Phase.BACKWARD) == [("native_batch_norm_backward", 4 * 592)]

    def test_inputs_are_made_dense_for_cudnn(self) -> None:
        x = torch.zeros(2, 6, 8, 6).transpose(1, 2)
        graph = run_step(nn.BatchNorm2d(8), x)
        assert made(graph) == [("clone", 4 * 576), ("cudnn_batch_norm", 4 * 592)]
        assert saved(graph)[0] == ((2, 8, 6, 6), "float32")  # the copy

    def test_inference(self) -> None:
        graph = run_step(nn.BatchNorm2d(8), torch.zeros(2, 8, 6, 6), mode="infer")
        assert backend(graph) == [("cudnn_batch_norm", 4 * 576)]


class TestInstanceNorm:
    def test_parameters_are_repeated_for_each_image(self) -> None:
        # Normalization.cpp, instance_norm: one image of 2 * 8 channels.
        graph = run_step(nn.InstanceNorm2d(8, affine=True), leaf(2, 8, 6, 6))
        assert made(graph) == [("repeat", 64), ("repeat", 64), ("cudnn_batch_norm", 4 * 608)]
        assert saved(graph) == [((16,), "float32"), ((16,), "float32"), ((16,), "float32")]

    def test_without_parameters_it_is_native(self) -> None:
        graph = run_step(nn.InstanceNorm2d(8), leaf(2, 8, 6, 6))
        assert backend(graph) == [("native_batch_norm", 4 * 608)]

    def test_running_statistics_are_averaged(self) -> None:
        graph = run_step(nn.InstanceNorm2d(8, track_running_stats=True), leaf(2, 8, 6, 6))
        assert [entry for entry in made(graph) if entry[0] == "mean"] == [("mean", 32)] * 2


def test_evaluation_returns_statistics_on_cuda(gpu: None) -> None:
    x, column = torch.empty(2, 8, 6, 6, dtype=torch.bfloat16), torch.empty(8)
    args = (x, column, column, column, column)
    (_, mean, invstd), _ = run_kernel(aten.native_batch_norm.default, *args, False, 0.1, 1e-5)
    assert mean.dtype == invstd.dtype == torch.float32 and mean.shape == invstd.shape == (8,)


class TestBuffers:
    """``Normalization.cuh``."""

    def forward(self, x: Tensor, weight: Tensor | None, training: bool = True) -> int:
        column = torch.empty(x.shape[1])
        args = (x, weight, weight, column, column, training, 0.1, 1e-5)
        return estimate(aten.native_batch_norm.default, *args)

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mask: list[bool], train: bool = True
    ) -> int:
        column = torch.empty(x.shape[1])
        args = (grad, x, weight, column, column, column, column, train, 1e-5, mask)
        return estimate(aten.native_batch_norm_backward.default, *args)

    def test_planes_need_none(self, gpu: None) -> None:
        x, weight = torch.empty(32, 64, 56, 56, dtype=torch.bfloat16), torch.empty(64)
        assert self.forward(x, weight) == 0
        assert self.backward(x, x, weight, [True] * 3) == 0

    def test_channels_last_stages_sums_by_block(self, gpu: None) -> None:
        x = torch.empty(32, 64, 56, 56, dtype=torch.bfloat16).to(memory_format=LAST)
        weight = torch.empty(64)
        # 100352 rows of 64: threads 32 x 16; 100352 / 256 = 392 blocks of rows, at most 128; two
        # blocks of channels, each with a semaphore. Four sums of floats, in backward two.
        assert self.forward(x, weight) == 4 * 64 * 128 * 4 + 2 * 4
        # Backward: the sums of 64 floats and the weight's gradients are there with the staged
        # ones, but not yet the input's gradient, which is larger.
        staged = 2 * 64 * 128 * 4 + 2 * 4
        assert staged < 2 * x.numel() and self.backward(x, x, weight, [True] * 3) == 2 * 256
        assert self.backward(x, x, weight, [False, True, True]) == 2 * 256 + staged
        assert self.forward(x, weight, training=False) == 0

    def test_rows_of_features_are_channels_last(self, gpu: None) -> None:
        # (4096, 512): threads 32 x 16, 4096 / 256 = 16 blocks of rows, 512 / 32 of channels.
        x, weight = torch.empty(4096, 512), torch.empty(512)
        assert self.forward(x, weight) == 4 * 512 * 16 * 4 + 16 * 4
        # (1024, 512): 4 blocks of rows are too few to share.
        assert self.forward(torch.empty(1024, 512), weight) == 0

    def test_gradients_of_another_format_are_of_the_input_s(self, gpu: None) -> None:
        x, column = torch.empty(2, 8, 6, 6).to(memory_format=LAST), torch.empty(8)
        args = (x.contiguous(), x, column, column, column, column, column, True, 1e-5, [True] * 3)
        (grad, _, _), nbytes = run_kernel(aten.native_batch_norm_backward.default, *args)
        assert grad.is_contiguous(memory_format=LAST)
        assert nbytes == 2 * 32

    def test_cudnn_s_evaluation_leaves_the_deviation_to_backward(self, gpu: None) -> None:
        x, column = torch.empty(2, 8, 6, 6).to(memory_format=LAST), torch.empty(8)
        empty = torch.empty(0)
        args = (x, x, column, column, column, empty, empty, False, 1e-5, [True, False, False])
        assert estimate(aten.native_batch_norm_backward.default, *args) == 32

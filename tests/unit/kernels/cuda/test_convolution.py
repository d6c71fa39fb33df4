"""Convolutions on CUDA, against ``Convolution.cpp``, ``ConvShared.cpp``, ``DepthwiseConv2d.cu``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_steps import estimate, made, run_kernel, run_step, workspaces
from torch import Tensor, nn

from fxmem import analyze
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.graph import Phase
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.convolution.backends import ConvBackend, Geometry, select_backend
from fxmem.kernels.cuda.convolution.convolution import limit_cudnn_workspace
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.registry import OperatorCall

aten = torch.ops.aten
LAST = torch.channels_last
F16, F32 = torch.float16, torch.float32


def geometry(stride: int = 1, groups: int = 1, **changed: Any) -> Geometry:
    plain = Geometry((stride, stride), (1, 1), (1, 1), False, (0, 0), groups)
    return dataclasses.replace(plain, **changed)


def arguments(dims: int = 2, groups: int = 1, *, padding: int = 0, flip: bool = False) -> Any:
    """Stride, padding, dilation, whether transposed, output padding, groups."""
    ones, zeros = [1] * dims, [0] * dims
    return ones, [padding] * dims, ones, flip, zeros, groups


def empty(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(sizes, dtype=dtype)


class TestBackend:
    def test_cudnn(self, gpu: None) -> None:
        x, weight = empty(2, 8, 9, 9), empty(4, 8, 3, 3)
        assert select_backend(x, weight, geometry()) is ConvBackend.CUDNN
        assert select_backend(x, weight, geometry(dilation=(2, 2))) is ConvBackend.CUDNN
        big = geometry(transposed=True, output_padding=(1, 1))
        assert select_backend(x, weight, big) is ConvBackend.COLUMNS
        with torch.backends.cudnn.flags(enabled=False):
            assert select_backend(x, weight, geometry()) is ConvBackend.COLUMNS
        assert select_backend(x[:0], weight, geometry()) is ConvBackend.EMPTY

    @pytest.mark.parametrize(
        ("dtype", "sizes", "side", "stride", "takes_cudnn"),
        [
            (F32, (2, 64, 14), 3, 1, False),  # half precision alone
            (torch.bfloat16, (2, 64, 14), 3, 1, False),
            (F16, (2, 64, 14), 3, 1, True),
            (F16, (2, 16, 14), 3, 1, False),  # fewer than 32 channels
            (F16, (2, 64, 14), 7, 1, False),
            (F16, (2, 64, 6), 3, 1, False),
            (F16, (2, 64, 14), 3, 2, False),
            (F16, (2, 512, 14), 3, 2, True),
            (F16, (2, 256, 28), 3, 2, True),
            (F16, (1, 64, 14), 3, 2, True),
        ],
    )
    def test_depthwise(
        self, dtype: Any, sizes: Any, side: int, stride: int, takes_cudnn: bool, gpu: None
    ) -> None:
        batch, channels, width = sizes
        x = empty(batch, channels, width, width, dtype=dtype)
        weight = empty(channels, 1, side, side, dtype=dtype)
        depthwise = geometry(stride, channels)
        found = select_backend(x, weight, depthwise)
        assert found is (ConvBackend.CUDNN if takes_cudnn else ConvBackend.DEPTHWISE)
        # always in channels last
        assert select_backend(x.to(memory_format=LAST), weight, depthwise) is ConvBackend.CUDNN


class TestForward:
    def convolve(self, x: Tensor, weight: Tensor, groups: int = 1) -> int:
        args = arguments(x.dim() - 2, groups)
        return estimate(aten.convolution.default, x, weight, None, *args)

    def test_operands_are_copied_for_their_layout(self, gpu: None, full_precision: None) -> None:
        x, weight = empty(2, 8, 9, 9), empty(4, 8, 3, 3)
        assert self.convolve(x, weight) == 0
        assert self.convolve(x.to(memory_format=LAST), weight) == 4 * 288
        assert self.convolve(x, weight.to(memory_format=LAST)) == 4 * 1296
        double = x.double().to(memory_format=LAST)  # cuDNN has doubles in planes only
        assert self.convolve(double, weight.double()) == 8 * 1296
        gaps = empty(2, 9, 8, 9).transpose(1, 2)
        assert self.convolve(gaps, weight) == 4 * 1296
        assert self.convolve(gaps, empty(8, 1, 3, 3), groups=8) == 4 * 1296
        assert self.convolve(empty(2, 9, 8).transpose(1, 2), empty(4, 8, 3)) == 4 * 144
        # Without cuDNN an image becomes columns: 8 channels under 9 positions of the kernel, at
        # 7 x 7 pixels.
        with torch.backends.cudnn.flags(enabled=False):
            assert self.convolve(x, weight) == 4 * 8 * 9 * 49

    def test_half_precision_in_planes_is_reordered_for_tensor_cores(self, gpu: None) -> None:
        # Input, weight and result once more, 3 channels padded to 8: pytorch issue 123533.
        x, weight = empty(2, 3, 9, 9, dtype=torch.half), empty(4, 3, 3, 3, dtype=torch.half)
        reordered = 2 * (2 * 8 * 81 + 8 * 8 * 9 + 2 * 8 * 49)
        assert self.convolve(x, weight) == reordered
        assert self.convolve(x.bfloat16(), weight.bfloat16()) == reordered
        line = empty(2, 3, 9, dtype=torch.half), empty(4, 3, 3, dtype=torch.half)
        assert self.convolve(*line) == 2 * (2 * 8 * 9 + 8 * 8 * 3 + 2 * 8 * 7)
        assert self.convolve(x, weight.to(memory_format=LAST)) == 2 * 2 * 3 * 81  # as it takes them

    def test_float32_is_reordered_without_padding(self, gpu: None) -> None:
        # As TF32, on an H200: tests/data/cuda, resnet50-b32-fp32-adam and unet-b8-fp32-adam.
        x, weight = empty(2, 3, 8, 8), empty(4, 3, 3, 3)
        assert self.convolve(x, weight) == 4 * (2 * 3 * 64 + 4 * 3 * 9 + 2 * 4 * 36)
        point = empty(4, 3, 1, 1)
        assert self.convolve(x, point) == 0  # a product of matrices
        assert self.convolve(x[..., :7, :7].contiguous(), point) == 4 * (2 * 3 * 49 + 2 * 4 * 49)
        # Transposed, as the U-Net's; and one channel at a time stays in planes.
        x, weight, flip = empty(2, 4, 8, 8), empty(4, 3, 3, 3), arguments(flip=True)
        found = estimate(aten.convolution.default, x, weight, None, *flip)
        assert found == 4 * (2 * 4 * 64 + 4 * 3 * 9 + 2 * 3 * 100)
        assert self.convolve(x, empty(8, 1, 3, 3), groups=4) == 0

    def test_what_is_not_measured_is_a_range_alone(self, gpu: None) -> None:
        x, weight = empty(2, 4, 9, 9, dtype=torch.half), empty(4, 4, 3, 3, dtype=torch.half)
        block = empty(2, 4, 9, 9, 9, dtype=torch.half), empty(4, 4, 3, 3, 3, dtype=torch.half)
        assert self.convolve(*block) == 0
        with use_gpu(Gpu(capability=(6, 0))):  # no tensor cores
            assert self.convolve(x, weight) == 0
        with use_gpu(Gpu(capability=(7, 5))):  # none for bfloat16
            assert self.convolve(x, weight) > 0
            assert self.convolve(x.bfloat16(), weight.bfloat16()) == 0
        with use_gpu(Gpu(capability=(10, 0))):  # other plans, as measured on a B200
            assert self.convolve(x, weight) == 0

    def test_the_range_goes_on_above_what_is_counted(self, gpu: None) -> None:
        args = (None, *arguments())
        limit = CUDA.libraries[aten.convolution.default]
        for dtype in (torch.float32, torch.half):
            x, weight = empty(2, 8, 9, 9, dtype=dtype), empty(8, 8, 3, 3, dtype=dtype)
            result, counted = run_kernel(aten.convolution.default, x, weight, *args)
            most = limit_cudnn_workspace(x, weight, result)
            assert limit(OperatorCall((x, weight, *args), {}, result)) == most - counted
            assert counted > 0
        x, weight, out = empty(2, 3, 9, 9), empty(8, 3, 3, 3), empty(2, 8, 7, 7)
        # 3 channels padded to 8; and the weight's gradient once as floats.
        high = 4 * (2 * 8 * 81 + 8 * 8 * 9 + 2 * 8 * 49) + 4 * 216
        assert limit_cudnn_workspace(x, weight, out) == high
        x = x.to(memory_format=LAST)
        assert limit_cudnn_workspace(x, weight, out) == 4 * 216


class TestBackward:
    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, *mask: bool) -> int:
        args = (grad, x, weight, [4], *arguments(), list(mask))
        return estimate(aten.convolution_backward.default, *args)

    def test_copies_for_each_kernel(self, gpu: None, full_precision: None) -> None:
        grad, x, weight = empty(2, 4, 7, 7), empty(2, 8, 9, 9), empty(4, 8, 3, 3)
        assert self.backward(grad, x, weight, True, True, True) == 0
        # A gradient that is spread: of the copy of 392 floats, beside the input's gradient of 1296
        # and the weight's of 288, the bias's of 4 is not there yet.
        spread = torch.empty(1).expand(2, 4, 7, 7)
        assert self.backward(spread, x, weight, True, True, True) == 4 * (392 - 4)
        assert self.backward(spread, x, weight, False, True, False) == 4 * 392
        # The gradient in channels last; with it the weight, while there is no weight's gradient.
        last, expected = x.to(memory_format=LAST), max(392 + 288 - 288 - 4, 392 - 4)
        assert self.backward(grad, last, weight, True, True, True) == 4 * expected

    def test_half_precision_in_planes_is_reordered_for_each_gradient(self, gpu: None) -> None:
        # Liger-Kernel's multi-token attention: 4 channels padded to 8, one after the other. Beside
        # the input's gradient those of weight and bias are not there yet; beside the weight's that
        # of the bias is not.
        grad, x = empty(2, 4, 7, 7, dtype=torch.half), empty(2, 4, 9, 9, dtype=torch.half)
        weight = empty(4, 4, 3, 3, dtype=torch.half)
        reordered = 2 * (2 * 8 * 81 + 8 * 8 * 9 + 2 * 8 * 49)
        assert self.backward(grad, x, weight, True, True, True) == reordered - 2 * 4
        assert self.backward(grad, x, weight, True, True, False) == reordered
        assert self.backward(grad, x, weight, False, True, False) == reordered
        args = (grad, x, weight, [4], *arguments(), [True] * 3)
        limit = CUDA.libraries[aten.convolution_backward.default]
        assert (
            limit(OperatorCall(args, {})) == weight.numel() * 4
        )  # of the range the weight's parts

    def test_many_pixels_are_summed_with_a_buffer(self, gpu: None, full_precision: None) -> None:
        # (64, 4, 64, 64): 262144 inputs for each of 4 outputs, in two dimensions, so one at a
        # time: threads of 128 x 4; 2048 values, 512 among four. 432 blocks of 512 threads fit;
        # 512 / 16 = 32 share an output, whose sum each writes once.
        operands = (empty(64, 4, 64, 64), empty(64, 8, 66, 66), empty(4, 8, 3, 3))
        assert self.backward(*operands, True, True, True) == 4 * 4 * 32 + 4 * 4


class TestFormat:
    """ConvShared.cpp: channels last if input or weight are, but not for float64."""

    def convolve(self, x: Tensor, weight: Tensor, groups: int = 1) -> list[Tensor]:
        args = arguments(x.dim() - 2, groups, padding=1)
        result, _ = run_kernel(aten.convolution.default, x, weight, None, *args)
        operands = (torch.empty_like(result), x, weight, None, *args, [True, True, False])
        gradients, _ = run_kernel(aten.convolution_backward.default, *operands)
        assert gradients[2] is None
        return [result, *gradients[:2]]

    @pytest.mark.parametrize("dims", [2, 3])
    # The CPU's backends differ by batch and type, and with them the fake kernel's.
    @pytest.mark.parametrize("batch", [1, 8])
    @pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
    def test_one_operand_is_enough(
        self, dims: int, batch: int, dtype: torch.dtype, gpu: None
    ) -> None:
        last = LAST if dims == 2 else torch.channels_last_3d
        x = torch.empty(batch, 4, *[6] * dims, dtype=dtype)
        weight = torch.empty(8, 4, *[3] * dims, dtype=dtype)
        for operands in (
            (x.to(memory_format=last), weight),
            (x, weight.to(memory_format=last)),
        ):
            assert all(y.is_contiguous(memory_format=last) for y in self.convolve(*operands))

    def test_planes(self, gpu: None) -> None:
        x, weight = empty(2, 4, 6, 6), empty(8, 4, 3, 3)
        last = x.to(memory_format=LAST), weight.to(memory_format=LAST)
        with torch.backends.cudnn.flags(enabled=False):
            assert all(y.is_contiguous() for y in self.convolve(*last))
        for operands in (
            (x, weight),
            (last[0].double(), last[1].double()),
            (empty(2, 4, 6), empty(8, 4, 3)),
        ):
            assert all(y.is_contiguous() for y in self.convolve(*operands))


def test_the_host_s_convolution_is_left_alone() -> None:
    with make_fake_mode():
        x, weight = torch.empty(2, 4, 6, 6), torch.empty(8, 4, 3, 3)
        args = arguments(padding=1)
        assert CUDA.kernels[aten.convolution.default](x, weight, None, *args) is NotImplemented
        backward = CUDA.kernels[aten.convolution_backward.default]
        assert backward(x, x, weight, None, *args, [True] * 3) is NotImplemented


def build(last: bool) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
    return model.to(memory_format=LAST) if last else model


X, OUT, WEIGHT = 2 * 8 * 36 * 4, 2 * 16 * 36 * 4, 16 * 8 * 9 * 4
"""Bytes of the input, the result and the weight of that model."""


SOURCE = """
from torch import channels_last, nn
layers = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
model = nn.Sequential(*layers).to(memory_format=channels_last)
"""


@pytest.mark.parametrize(
    ("spec", "loaded"), [("2x8x6x6:channels_last", True), ("2x8x6x6", True), ("2x8x6x6", False)]
)
def test_a_model_in_channels_last(spec: str, loaded: bool, tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(SOURCE)
    model = f"{tmp_path / 'last.py'}:model" if loaded else build(last=True)
    graph = analyze(model, (spec,), device="cuda").graph
    # _convolution: input.contiguous(channels_last), again in backward, where the weight's
    # gradient is there by then.
    copied = 0 if "last" in spec else X
    assert made(graph)[0] == ("convolution", OUT + copied)
    backward = made(graph, Phase.BACKWARD)
    # The gradient of a sum is one element seen everywhere; batch norm copies it (cuDNN takes
    # dense ones). That of the weight is of its format, and stolen.
    assert backward[-1] == ("convolution_backward", WEIGHT + copied)


def test_planes_in_a_model_for_which_the_input_decides() -> None:
    x = torch.zeros(2, 8, 6, 6).to(memory_format=LAST)
    graph = run_step(build(last=False), x)
    # The weight is copied to channels last; its gradient is of that format, and copied to the
    # weight's by AccumulateGrad (accumulate_grad.h, ``clone_obey_contract``).
    assert made(graph)[0] == ("convolution", OUT + WEIGHT)
    assert made(graph, Phase.BACKWARD)[-2:] == [
        ("convolution_backward", WEIGHT),
        ("new_empty_strided", WEIGHT),
    ]


def test_a_step(full_precision: None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    graph = run_step(model, torch.zeros(2, 3, 9, 9))
    assert made(graph)[0] == ("convolution", 4 * 2 * 8 * 81)
    # The gradient of a sum, one element seen everywhere, is copied: 784 floats, beside the
    # gradient of the input; that of the bias comes later.
    assert workspaces(graph) == {"aten.convolution_backward.default": 4 * (784 - 8)}
    sizes = [size for name, size in made(graph, Phase.BACKWARD) if "convolution" in name]
    assert sizes == [4 * (1296 + 576 + 784), 4 * (216 + 8)]

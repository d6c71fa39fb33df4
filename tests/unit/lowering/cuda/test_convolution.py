"""Convolutions on CUDA, against ``Convolution.cpp``, ``ConvShared.cpp``, ``DepthwiseConv2d.cu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_steps import estimate, made, on_gpu, run_step, workspaces
from torch import Tensor, nn

from fxmem.graph import Phase
from fxmem.lowering.cuda.convolution import estimate_cudnn_workspace_range
from fxmem.lowering.cuda.convolution_backends import Backend, Geometry, select_backend

aten = torch.ops.aten
LAST = torch.channels_last


@pytest.fixture
def gpu() -> Iterator[None]:
    with on_gpu():
        yield


def geometry(stride: int = 1, groups: int = 1, **changed: object) -> Geometry:
    values = {
        "stride": (stride, stride),
        "padding": (1, 1),
        "dilation": (1, 1),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": groups,
    }
    return Geometry(**(values | changed))  # type: ignore[arg-type]


def empty(*sizes: int, dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    x = torch.empty(sizes, dtype=dtype)
    return x.to(memory_format=LAST) if last else x


class TestBackend:
    def test_cudnn(self, gpu: None) -> None:
        x, weight = empty(2, 8, 9, 9), empty(4, 8, 3, 3)
        assert select_backend(x, weight, geometry()) is Backend.CUDNN
        assert select_backend(x, weight, geometry(dilation=(2, 2))) is Backend.CUDNN
        big = geometry(transposed=True, output_padding=(1, 1))
        assert select_backend(x, weight, big) is Backend.COLUMNS
        with torch.backends.cudnn.flags(enabled=False):
            assert select_backend(x, weight, geometry()) is Backend.COLUMNS
        assert select_backend(x[:0], weight, geometry()) is Backend.EMPTY

    @pytest.mark.parametrize(
        ("dtype", "last", "side", "stride", "batch", "channels", "width", "takes_cudnn"),
        [
            (torch.float32, False, 3, 1, 2, 64, 14, False),  # half precision alone
            (torch.bfloat16, False, 3, 1, 2, 64, 14, False),
            (torch.float32, True, 3, 1, 2, 64, 14, True),  # always in channels last
            (torch.float16, False, 3, 1, 2, 64, 14, True),
            (torch.float16, False, 3, 1, 2, 16, 14, False),  # fewer than 32 channels
            (torch.float16, False, 7, 1, 2, 64, 14, False),
            (torch.float16, False, 3, 1, 2, 64, 6, False),
            (torch.float16, False, 3, 2, 2, 64, 14, False),
            (torch.float16, False, 3, 2, 2, 512, 14, True),
            (torch.float16, False, 3, 2, 2, 256, 28, True),
            (torch.float16, False, 3, 2, 1, 64, 14, True),
        ],
    )
    def test_depthwise(
        self,
        dtype: torch.dtype,
        last: bool,
        side: int,
        stride: int,
        batch: int,
        channels: int,
        width: int,
        takes_cudnn: bool,
        gpu: None,
    ) -> None:
        x = empty(batch, channels, width, width, dtype=dtype, last=last)
        weight = empty(channels, 1, side, side, dtype=dtype)
        found = select_backend(x, weight, geometry(stride, channels))
        assert found is (Backend.CUDNN if takes_cudnn else Backend.DEPTHWISE)


class TestForward:
    def convolve(self, x: Tensor, weight: Tensor, groups: int = 1, **flags: object) -> int:
        dims = x.dim() - 2
        args = (None, [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, groups)
        return estimate(aten.convolution.default, x, weight, *args)

    def test_dense_operands_are_used_as_they_are(self, gpu: None) -> None:
        assert self.convolve(empty(2, 8, 9, 9), empty(4, 8, 3, 3)) == 0

    def test_one_operand_in_channels_last_has_the_other_copied(self, gpu: None) -> None:
        x, weight = empty(2, 8, 9, 9), empty(4, 8, 3, 3)
        assert self.convolve(x.to(memory_format=LAST), weight) == 4 * 288
        assert self.convolve(x, weight.to(memory_format=LAST)) == 4 * 1296
        double = x.double().to(memory_format=LAST)  # cuDNN has doubles in planes only
        assert self.convolve(double, weight.double()) == 8 * 1296

    def test_what_is_not_dense_is_copied(self, gpu: None) -> None:
        x = empty(2, 9, 8, 9).transpose(1, 2)
        assert self.convolve(x, empty(4, 8, 3, 3)) == 4 * 1296
        line = empty(2, 9, 8).transpose(1, 2)
        assert self.convolve(line, empty(4, 8, 3)) == 4 * 144

    def test_depthwise_wants_planes(self, gpu: None) -> None:
        x = empty(2, 9, 8, 9).transpose(1, 2)
        assert self.convolve(x, empty(8, 1, 3, 3), groups=8) == 4 * 1296

    def test_without_cudnn_an_image_becomes_columns(self, gpu: None) -> None:
        # 8 channels under 9 positions of the kernel, at 7 x 7 pixels.
        with torch.backends.cudnn.flags(enabled=False):
            assert self.convolve(empty(2, 8, 9, 9), empty(4, 8, 3, 3)) == 4 * 8 * 9 * 49


class TestBackward:
    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, *mask: bool) -> int:
        args = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(mask))
        return estimate(aten.convolution_backward.default, grad, x, weight, *args)

    def test_dense_operands_need_nothing(self, gpu: None) -> None:
        operands = (empty(2, 4, 7, 7), empty(2, 8, 9, 9), empty(4, 8, 3, 3))
        assert self.backward(*operands, True, True, True) == 0

    def test_a_gradient_that_is_spread_is_made_dense_for_each_kernel(self, gpu: None) -> None:
        grad = torch.empty(1).expand(2, 4, 7, 7)
        operands = (grad, empty(2, 8, 9, 9), empty(4, 8, 3, 3))
        # Of the copy of 392 floats, beside the input's gradient of 1296 and the weight's of 288,
        # the bias's of 4 is not there yet.
        assert self.backward(*operands, True, True, True) == 4 * (392 - 4)
        assert self.backward(*operands, False, True, False) == 4 * 392

    def test_channels_last_of_the_input_makes_the_gradient_follow(self, gpu: None) -> None:
        operands = (empty(2, 4, 7, 7), empty(2, 8, 9, 9, last=True), empty(4, 8, 3, 3))
        # The gradient in channels last; with it the weight, while there is no weight's gradient.
        expected = max(392 + 288 - 288 - 4, 392 - 4)
        assert self.backward(*operands, True, True, True) == 4 * expected

    def test_many_pixels_are_summed_with_a_buffer(self, gpu: None) -> None:
        # (64, 4, 64, 64): 262144 inputs for each of 4 outputs, in two dimensions, so one at a
        # time: threads of 128 x 4; 2048 values, 512 among four. 432 blocks of 512 threads fit;
        # 512 / 16 = 32 share an output, whose sum each writes once.
        operands = (empty(64, 4, 64, 64), empty(64, 8, 66, 66), empty(4, 8, 3, 3))
        assert self.backward(*operands, True, True, True) == 4 * 4 * 32 + 4 * 4


def test_a_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    graph = run_step(model, torch.zeros(2, 3, 9, 9))
    assert made(graph)[0] == ("convolution", 4 * 2 * 8 * 81)
    # The gradient of a sum, one element seen everywhere, is copied: 784 floats, beside the
    # gradient of the input; that of the bias comes later.
    assert workspaces(graph) == {"aten.convolution_backward.default": 4 * (784 - 8)}
    sizes = [size for name, size in made(graph, Phase.BACKWARD) if "convolution" in name]
    assert sizes == [4 * (1296 + 576 + 784), 4 * (216 + 8)]


def test_the_range_of_cudnn_s_workspace(gpu: None) -> None:
    x, weight, out = empty(2, 3, 9, 9), empty(8, 3, 3, 3), empty(2, 8, 7, 7)
    # 3 channels padded to 8; and the weight's gradient once as floats.
    high = 4 * (2 * 8 * 81 + 8 * 8 * 9 + 2 * 8 * 49) + 4 * 216
    assert estimate_cudnn_workspace_range(x, weight, out) == (0, high)
    last = x.to(memory_format=LAST)
    assert estimate_cudnn_workspace_range(last, weight, out) == (0, 4 * 216)

"""Pooling, resampling and padding on CUDA: copies, and the formats of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_steps import make_buffers_test, on_gpu, run_kernel, run_step
from torch import Tensor, nn

aten = torch.ops.aten
F = nn.functional
LAST = torch.channels_last
GEOMETRY = ([2, 2], [2, 2], [0, 0])
AVERAGE = (*GEOMETRY, False, True, None)


def image(channels: int = 8, last: bool = False, side: int = 6) -> Tensor:
    x = torch.empty(2, channels, side, side)
    return x.to(memory_format=LAST) if last else x


def volume() -> Tensor:
    return torch.empty(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)


def spread(*sizes: int) -> Tensor:
    """A gradient as it comes from a sum: one element, seen everywhere."""
    return torch.empty(1).expand(sizes)


def resampled(*sizes: int) -> Any:
    """Arguments of a backward to half of these sizes."""
    return lambda: (spread(2, 3, *sizes), sizes, [2, 3, *(n // 2 for n in sizes)], False)


def pooled(gradient: Callable[[], Tensor], last: bool = False) -> Any:
    indices = lambda: image(last=last, side=3).long()  # noqa: E731
    return lambda: (gradient(), image(last=last), *GEOMETRY, [1, 1], False, indices())


BUFFERS = [
    # DilatedMaxPool2d.cu, AveragePool2d.cu: operands in the input's format.
    ("max_pool2d_with_indices", lambda: (image(last=True), *GEOMETRY), 0),
    ("max_pool2d_with_indices_backward", pooled(lambda: image(side=3)), 0),
    ("max_pool2d_with_indices_backward", pooled(lambda: spread(2, 8, 3, 3)), 144 * 4),
    ("max_pool2d_with_indices_backward", pooled(lambda: image(8, True, 3), True), 0),
    ("max_pool2d_with_indices_backward", pooled(lambda: image(8, False, 3), True), 144 * 4),
    ("avg_pool2d_backward", lambda: (spread(2, 8, 3, 3), image(), *AVERAGE), 144 * 4),
    # AdaptiveAveragePooling.cu: channels last by their strides; else, and in 3d, planes.
    ("_adaptive_avg_pool2d", lambda: (image(last=True), [3, 3]), 0),
    ("_adaptive_avg_pool2d", lambda: (image().transpose(2, 3), [3, 3]), 576 * 4),
    ("_adaptive_avg_pool2d_backward", lambda: (spread(2, 8, 3, 3), image()), 144 * 4),
    ("_adaptive_avg_pool2d_backward", lambda: (spread(2, 8, 3, 3), image(last=True)), 0),
    ("_adaptive_avg_pool3d", lambda: (volume(), [2, 2, 2]), 1024 * 4),
    # AdaptiveMaxPooling2d.cu: planes, results by a copy: 144 floats and 144 indices.
    ("adaptive_max_pool2d", lambda: (image(last=True), [3, 3]), 576 * 4 + 144 * 12),
    # UpSampleNearest2d.cu from 4 channels on, UpSampleBilinear2d.cu by strides.
    ("upsample_nearest2d", lambda: (image(3, last=True), [12, 12]), 216 * 4),
    ("upsample_nearest2d", lambda: (image(8, last=True), [12, 12]), 0),
    ("upsample_bilinear2d", lambda: (image(3, last=True), [12, 12], False), 0),
    ("upsample_bilinear2d_backward", resampled(12, 12), 864 * 4),
    ("upsample_linear1d_backward", resampled(12), 72 * 4),
]
test_buffers = make_buffers_test(BUFFERS)


@pytest.mark.parametrize(
    ("function", "channels", "stays"),
    [
        (lambda x: F.max_pool2d(x, 2), 8, True),
        (lambda x: F.interpolate(x, scale_factor=2.0), 3, False),
        (lambda x: F.interpolate(x, scale_factor=2.0), 4, True),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), 15, False),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), 16, True),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 16, False),
        (lambda x: F.pixel_shuffle(x, 2), 16, False),
    ],
)
def test_channels_last_where_it_is_faster(
    function: Callable[[Tensor], Tensor], channels: int, stays: bool
) -> None:
    x = torch.zeros(2, channels, 6, 6).to(memory_format=LAST)
    found = []

    def run(x: Tensor) -> Tensor:
        result = function(x)
        found.append(result.is_contiguous(memory_format=LAST))
        return result

    run_step(run, x, mode="infer")
    assert all(state is stays for state in found)


def test_folding_keeps_the_storage_of_its_columns() -> None:
    # Col2Im.cu: empty_like(input), resized to the smaller image.
    geometry = ([6, 6], [3, 3], [1, 1], [0, 0], [1, 1])
    with on_gpu():
        result, _ = run_kernel(aten.col2im.default, torch.empty(2, 36, 16), *geometry)
    assert result.shape == (2, 4, 6, 6) and result.untyped_storage().nbytes() == 1152 * 4

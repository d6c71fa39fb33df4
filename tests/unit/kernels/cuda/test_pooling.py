"""Pooling, resampling and padding on CUDA: copies, and the formats of results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_steps import estimate, run_kernel, run_step, saved
from torch import Tensor, nn

from fxmem.kernels.cuda import CUDA

aten = torch.ops.aten
F = nn.functional
LAST = torch.channels_last


def image(channels: int = 8, last: bool = False) -> Tensor:
    x = torch.empty(2, channels, 6, 6)
    return x.to(memory_format=LAST) if last else x


def spread(*sizes: int) -> Tensor:
    """A gradient as it comes from a sum: one element, seen everywhere."""
    return torch.empty(1).expand(sizes)


@pytest.mark.parametrize("last", [False, True])
def test_pooling_follows_the_input(last: bool, gpu: None) -> None:
    x = image(last=last)
    geometry = ([2, 2], [2, 2], [0, 0])
    (pooled, indices), nbytes = run_kernel(aten.max_pool2d_with_indices.default, x, *geometry)
    assert nbytes == 0 and pooled.is_contiguous(memory_format=LAST) == last
    backward = aten.max_pool2d_with_indices_backward.default
    args = (x, *geometry, [1, 1], False, indices)
    assert estimate(backward, pooled, *args) == 0
    assert estimate(backward, spread(2, 8, 3, 3), *args) == 144 * 4
    average = aten.avg_pool2d_backward.default
    assert estimate(average, spread(2, 8, 3, 3), x, *geometry, False, True, None) == 144 * 4


def test_adaptive_pooling(gpu: None) -> None:
    x, last = image(), image(last=True)
    assert estimate(aten._adaptive_avg_pool2d.default, last, [3, 3]) == 0
    assert estimate(aten._adaptive_avg_pool2d.default, x.transpose(2, 3), [3, 3]) == 576 * 4
    backward = aten._adaptive_avg_pool2d_backward.default
    assert estimate(backward, spread(2, 8, 3, 3), x) == 144 * 4
    assert estimate(backward, spread(2, 8, 3, 3), last) == 0
    # In planes, results by a copy: 144 floats and 144 indices.
    assert estimate(aten.adaptive_max_pool2d.default, last, [3, 3]) == 576 * 4 + 144 * 12
    volume = torch.empty(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    assert estimate(aten._adaptive_avg_pool3d.default, volume, [2, 2, 2]) == 1024 * 4


@pytest.mark.parametrize(
    ("function", "channels", "stays"),
    [
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


def test_resampling_copies_for_planes(gpu: None) -> None:
    x = image(3, last=True)
    assert estimate(aten.upsample_nearest2d.default, x, [12, 12]) == 216 * 4
    assert estimate(aten.upsample_bilinear2d.default, x, [12, 12], False) == 0
    assert estimate(aten.upsample_nearest2d.default, image(8, last=True), [12, 12]) == 0
    backward = aten.upsample_bilinear2d_backward.default
    sizes = ([12, 12], [2, 3, 6, 6], False)
    assert estimate(backward, spread(2, 3, 12, 12), *sizes) == 864 * 4
    assert estimate(aten.upsample_linear1d_backward.default, spread(2, 3, 12), [12], [2, 3, 6],
                    False) == 72 * 4  # fmt: skip


def test_folding_keeps_the_storage_of_its_columns(gpu: None) -> None:
    # Col2Im.cu: empty_like(input), resized to the smaller image.
    columns = torch.empty(2, 36, 16)
    geometry = ([6, 6], [3, 3], [1, 1], [0, 0], [1, 1])
    result, _ = run_kernel(aten.col2im.default, columns, *geometry)
    assert result.shape == (2, 4, 6, 6) and result.untyped_storage().nbytes() == 1152 * 4


def test_log_sigmoid_saves_its_input_alone() -> None:
    graph = run_step(lambda x: F.logsigmoid(x * 1), torch.zeros(4, 6, requires_grad=True))
    assert saved(graph) == [((4, 6), "float32")]  # x * 1; the buffer is the CPU's


def test_distances_add_up_what_each_pair_contributes(gpu: None) -> None:
    first, second, distances = torch.empty(5, 3), torch.empty(7, 3), torch.empty(5, 7)
    args = (distances, first, second, 1.0, distances)
    assert estimate(aten._cdist_backward.default, *args) == 5 * 7 * 3 * 4


def test_norms_of_many_tensors(gpu: None) -> None:
    tensors = [torch.empty(200000), torch.empty(10)]
    assert estimate(aten._foreach_norm.Scalar, tensors, 2) == 2 * 4 * 4  # chunks of 65536


@pytest.mark.parametrize("name", ["_linalg_svd", "_fft_r2c", "linalg_qr"])
def test_libraries_keep_their_workspaces_to_themselves(name: str) -> None:
    assert "library" in CUDA.unmodelled[getattr(aten, name).default]

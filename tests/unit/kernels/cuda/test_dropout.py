"""Dropout on CUDA, against ``Dropout.cpp`` and ``cuda/Dropout.cu``: masks and copies."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import made, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase

F = nn.functional


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "function", [nn.Dropout(0.1), lambda x: torch.dropout(x, 0.5, True), lambda x: F.dropout(x)]
)
def test_keeps_a_mask_of_bytes(function: nn.Module, dtype: torch.dtype) -> None:
    graph = run_step(function, leaf(4, 6, dtype=dtype))
    assert saved(graph) == [((4, 6), "bool")]
    # native_dropout: the result and the mask; backward is one kernel, with its result.
    assert made(graph) == [("native_dropout", 24 * dtype.itemsize + 24)]
    assert made(graph, Phase.BACKWARD)[-1] == ("native_dropout_backward", 24 * dtype.itemsize)


def test_without_gradients_the_mask_is_made_and_dropped() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, training=True)

    graph = run_step(function, torch.zeros(4, 6), mode="infer")
    assert made(graph) == [("native_dropout", 24 * 4 + 24)]
    mask = next(storage for storage in graph.storages if storage.dtype == "bool")
    assert mask.died is not None


def test_in_place_it_multiplies_by_noise_of_the_input_s_type() -> None:
    # _dropout_impl<inplace>: empty_like, bernoulli_, div_, mul_, which saves the noise.
    graph = run_step(lambda x: F.dropout(x * 1, 0.1, inplace=True), leaf(4, 6))
    assert saved(graph) == [((4, 6), "float32")]
    assert made(graph)[1:] == [("empty_like", 96)]


@pytest.mark.parametrize(
    ("p", "train", "expected"),
    [(0.0, True, []), (0.1, False, []), (1.0, True, [("zeros", 4), ("mul", 96)])],
)
def test_nothing_is_drawn(p: float, train: bool, expected: list[tuple[str, int]]) -> None:
    graph = run_step(lambda x: torch.dropout(x, p, train), leaf(4, 6))
    assert [what for what in made(graph) if what[0] != "view"] == expected


@pytest.mark.parametrize("module", [nn.Dropout1d(0.1), nn.Dropout2d(0.1), nn.Dropout3d(0.1)])
def test_whole_channels_share_an_element_of_noise(module: nn.Module) -> None:
    # make_feature_noise: new_empty(N, C, 1, ...) of the input's type, saved by mul.
    dims = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}[type(module)]
    graph = run_step(module, leaf(2, 3, *[4] * dims))
    assert saved(graph) == [((2, 3, *[1] * dims), "float32")]


def test_alpha_dropout_keeps_its_noise() -> None:
    # noise.add(-1) is b; the result of mul is added to in place.
    graph = run_step(nn.AlphaDropout(0.1), leaf(4, 6))
    assert saved(graph) == [((4, 6), "float32")]
    assert made(graph) == [("empty_like", 96), ("add", 96), ("mul", 96)]


def test_the_host_has_the_kernels_of_the_cpu() -> None:
    graph = run_step(lambda x: x + F.dropout(torch.ones(4, 6)).to(x.device), leaf(4, 6))
    assert saved(graph) == []


def test_the_mask_has_the_input_s_format() -> None:
    x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    formats = []

    def function(x: Tensor) -> Tensor:
        result = F.dropout(x)
        formats.append(result.is_contiguous(memory_format=torch.channels_last))
        return result

    run_step(function, x, mode="infer")
    assert all(formats)

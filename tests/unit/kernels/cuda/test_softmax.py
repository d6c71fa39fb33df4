"""Softmax on CUDA, against ``SoftMax.cpp`` and ``SoftMax.cu``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_steps import estimate, made, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase

aten = torch.ops.aten
F = nn.functional


def leaf(dtype: torch.dtype) -> Tensor:
    return torch.zeros(4, 6, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    ],
)
def test_float16_becomes_float32_in_the_kernel(function: Callable[[Tensor], Tensor]) -> None:
    graph = run_step(function, leaf(torch.float16))
    assert [size for _, size in made(graph)] == [96]
    assert saved(graph) == [((4, 6), "float32")]
    # The gradient is of half precision. On its way, that of a softmax takes a product of floats,
    # the other one the incoming gradient, which is one element seen everywhere, as a dense copy.
    assert made(graph, Phase.BACKWARD)[-1][1] == 48 + 96


def test_bfloat16_is_cast_before() -> None:
    graph = run_step(lambda x: F.softmax(x, -1, dtype=torch.float32), leaf(torch.bfloat16))
    assert made(graph) == [("_to_copy", 96), ("_softmax", 96)]


def test_autocast_asks_for_floats() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return x.softmax(-1)

    assert made(run_step(function, leaf(torch.float16))) == [("_softmax", 96)]
    assert made(run_step(function, leaf(torch.bfloat16))) == [("_to_copy", 96), ("_softmax", 96)]


def test_buffers(gpu: None) -> None:
    x = torch.empty(8, 8)
    assert estimate(aten._softmax.default, x, -1, False) == 0
    assert estimate(aten._softmax.default, x.t(), -1, False) == 256
    backward, log_backward = aten._softmax_backward_data, aten._log_softmax_backward_data
    args = (-1, torch.float32)
    assert estimate(backward.default, x, x, *args) == 256  # grad * output
    assert estimate(backward.default, x.t(), x, *args) == 512  # laid out as grad: copied
    spread = torch.empty(1).expand(8, 8)
    assert estimate(backward.default, spread, x, *args) == 256
    assert estimate(log_backward.default, x, x, *args) == 0
    assert estimate(log_backward.default, spread, x, *args) == 256

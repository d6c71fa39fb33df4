"""What batch normalisation returns on the CPU: shapes, types and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem.kernels.cpu import CPU

FORWARD = torch.ops.aten.native_batch_norm.default
BACKWARD = torch.ops.aten.native_batch_norm_backward.default
F32, BF16 = torch.float32, torch.bfloat16


def describe(results: Any) -> list[Any]:
    return [None if t is None else (t.dtype, tuple(t.shape), t.stride()) for t in results]


def run(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    sizes: tuple[int, ...],
    order: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None],
    train: bool,
) -> list[Any]:
    x = torch.zeros(sizes, dtype=dtypes[0]).permute(order)
    channels = x.shape[1]
    weight = None if dtypes[1] is None else torch.ones(channels, dtype=dtypes[1])
    mean, variance = (torch.ones(channels, dtype=dtypes[1] or dtypes[0]) for _ in "mv")
    results = forward(x, weight, weight, mean, variance, train, 0.1, 1e-5)
    mask = [True, weight is not None, weight is not None]
    gradients = backward(
        torch.ones_like(results[0]), x, weight, mean, variance, *results[1:], train, 1e-5, mask
    )
    return describe(results) + describe(gradients)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, None), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ((6, 8), (1, 0)),
        ((6, 8, 5), (0, 1, 2)),
        ((6, 5, 8), (0, 2, 1)),  # as between attention layers
        ((2, 4, 4, 8), (0, 3, 1, 2)),  # channels last
        ((2, 4, 8, 5), (0, 2, 3, 1)),
        ((4, 6, 2, 8), (1, 3, 0, 2)),
        ((2, 2, 3, 2, 4), (0, 4, 1, 2, 3)),
        ((2, 2, 3, 2, 4), (0, 2, 1, 4, 3)),
    ],
)
def test_results_are_those_of_real_tensors(
    sizes: tuple[int, ...],
    order: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None],
    train: bool,
) -> None:
    real = run(FORWARD, BACKWARD, sizes, order, dtypes, train)
    with FakeTensorMode():
        fake = run(CPU.kernels[FORWARD], CPU.kernels[BACKWARD], sizes, order, dtypes, train)
    assert fake == real

"""Bags of embeddings take and keep what the CPU profiler sees."""

from __future__ import annotations

import pytest
import torch
from kernels import check

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore")

INDICES = torch.arange(48) % 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_embedding_bag(mode: int, padding: int, last: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(20, 6).to(dtype)
    offsets = torch.arange(0, 48 + last, 4)
    args = (weight, INDICES, offsets, False, mode, False, None, last, padding)
    check(aten._embedding_bag_forward_only.default, *args)
    out = check(aten._embedding_bag.default, *args)
    for grad in (torch.randn(12, 6).to(dtype), torch.ones(1, dtype=dtype).expand(12, 6)):
        check(
            aten._embedding_bag_backward.default,
            grad, INDICES, offsets, *out[1:], 20, False, mode, False, None, padding,  # type: ignore[index]
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [-1, 3])
def test_weighted_bags(padding: int, dtype: torch.dtype) -> None:
    weight, weights = torch.randn(20, 6).to(dtype), torch.randn(48).to(dtype)
    offsets, grad = torch.arange(0, 48, 4), torch.randn(12, 6).to(dtype)
    out = check(
        aten._embedding_bag.default,
        weight, INDICES, offsets, False, 0, False, weights, False, padding,
    )  # fmt: skip
    check(
        aten._embedding_bag_backward.default,
        grad, INDICES, offsets, *out[1:], 20, False, 0, False, weights, padding,  # type: ignore[index]
    )  # fmt: skip
    check(
        aten._embedding_bag_per_sample_weights_backward.default,
        grad, weight, INDICES, offsets, out[1], 0, padding,  # type: ignore[index]
    )  # fmt: skip


def test_short_indices_and_strided_weights() -> None:
    weight, offsets = torch.randn(20, 12)[:, :6], torch.arange(0, 48, 4, dtype=torch.int32)
    for mode in (0, 1, 2):
        for indices in (INDICES.int(), INDICES):
            rest = (offsets, False, mode, False, None, False, -1)
            check(aten._embedding_bag.default, weight, indices, *rest)

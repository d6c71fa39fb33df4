"""The encoder's fast path takes what the CPU profiler sees."""

from __future__ import annotations

import pytest
import torch
from kernels import check
from torch import Tensor

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, LENGTH, WIDTH, HEADS = 2, 10, 32, 4


def make(*sizes: int) -> Tensor:
    return torch.randn(sizes)


def masks() -> list[tuple[Tensor | None, int | None]]:
    return [
        (None, None),
        (torch.zeros(LENGTH, LENGTH), 0),
        (torch.zeros(LENGTH, LENGTH, dtype=torch.bool), 0),
        (torch.zeros(BATCH, LENGTH, dtype=torch.bool), 1),
        (torch.zeros(BATCH, HEADS, LENGTH, LENGTH), 2),
    ]


@pytest.mark.parametrize(("mask", "mask_type"), masks())
def test_attention(mask: Tensor | None, mask_type: int | None) -> None:
    x, other = make(BATCH, LENGTH, WIDTH), make(BATCH, LENGTH, WIDTH)
    weights = (make(3 * WIDTH, WIDTH), make(3 * WIDTH), make(WIDTH, WIDTH), make(WIDTH))
    strided = make(LENGTH, BATCH, WIDTH).transpose(0, 1)
    for inputs in ((x, x, x), (x, other, other), (x, other, x + 1), (strided,) * 3):
        for flags in ((False, True), (True, True), (True, False)):
            check(
                aten._native_multi_head_attention.default,
                *inputs, WIDTH, HEADS, *weights, mask, *flags, mask_type,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [8, 32, 256])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_encoder_layer(gelu: bool, norm_first: bool, hidden: int, dtype: torch.dtype) -> None:
    for mask, mask_type in masks():
        args = [
            make(BATCH, LENGTH, WIDTH), WIDTH, HEADS,
            make(3 * WIDTH, WIDTH), make(3 * WIDTH), make(WIDTH, WIDTH), make(WIDTH),
            gelu, norm_first, 1e-5, *(make(WIDTH) for _ in range(4)),
            make(hidden, WIDTH), make(hidden), make(WIDTH, hidden), make(WIDTH), mask, mask_type,
        ]  # fmt: skip
        args = [x.to(dtype) if isinstance(x, Tensor) and x is not mask else x for x in args]
        check(aten._transformer_encoder_layer_fwd.default, *args)

"""The matrix products that inductor pads, as an H200 was seen to (tests/data/cuda)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.compiling.padding import _is_padded_faster
from fxmem.gpus import find_gpu
from fxmem.graph import Category

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:Skipping serialization"),  # 2.6, of its own settings
]

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, WIDTH, BERT, GPT2 = 4096, 768, 30522, 50257
FREE, COPIED = True, False


def make(*sizes: int, dtype: torch.dtype = BF16, is_transposed: bool = False) -> Tensor:
    made = torch.empty(sizes[::-1] if is_transposed else sizes, dtype=dtype, device="meta")
    return made.t() if is_transposed else made


@pytest.mark.parametrize(
    ("left", "right", "is_free", "expected"),
    [
        # The logits of BERT and GPT-2; the head's weight is transposed.
        (make(ROWS, WIDTH), make(WIDTH, BERT, is_transposed=True), [FREE, COPIED], True),
        (make(ROWS, WIDTH), make(WIDTH, GPT2, is_transposed=True), [FREE, COPIED], True),
        # The gradient of what the head was given.
        (make(ROWS, BERT), make(BERT, WIDTH), [FREE, FREE], True),
        (make(ROWS, GPT2), make(GPT2, WIDTH), [FREE, FREE], True),
        # The gradient of the weight, for which that of the logits would be copied.
        (make(BERT, ROWS, is_transposed=True), make(ROWS, WIDTH), [COPIED, FREE], False),
        (make(GPT2, ROWS, is_transposed=True), make(ROWS, WIDTH), [COPIED, FREE], True),
        # Without tensor cores.
        (make(ROWS, WIDTH, dtype=FP32), make(WIDTH, GPT2, dtype=FP32), [FREE, FREE], False),
    ],
)
def test_a_product_is_padded_as_it_was(
    left: Tensor, right: Tensor, is_free: list[bool], expected: bool
) -> None:
    assert _is_padded_faster(left, right, is_free, find_gpu("h200")) is expected


class Head(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    ("words", "device", "padded"), [(1001, "cuda", 1008), (1008, "cuda", 1008), (1001, "cpu", 1001)]
)
def test_compiled_logits_have_padded_rows(words: int, device: str, padded: int) -> None:
    settings = {"device": device, "autocast": "bf16", "mode": "infer", "compile": True}
    graph = analyze(Head(words), (f"{ROWS}x{WIDTH}",), **settings).graph
    (logits,) = (each for each in graph.storages if each.category is Category.OUTPUT)
    assert logits.nbytes == ROWS * padded * 2

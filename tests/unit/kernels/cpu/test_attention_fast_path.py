"""Multi-head attention's fast path in inference, against the allocator of a real run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.cases import Case, Spec
from benchmarks.measure import measure_allocator


class Attention(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x, **self.settings)[0]
        return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [16, 256])
@pytest.mark.parametrize("setting", ["", "need_weights", "average_attn_weights"])
def test_the_peak_is_that_of_the_allocator(setting: str, length: int) -> None:
    settings = {setting: False} if setting else {}
    case = Case("attention", lambda: Attention(**settings), (Spec((4, length, 64)),))
    real = measure_allocator(case, "infer")
    analysis = fxmem.analyze(case.model(), (f"4x{length}x64",), mode="infer", device="cpu")
    assert analysis.peak_bytes == real["peak_bytes"]

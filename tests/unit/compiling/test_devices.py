"""Devices in the code that the compiler takes apart: what it decides by them is the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.compiling import compiler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(64, 128, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.narrow = nn.Conv2d(128, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.norm(self.widen(x)))
        return out


def test_layouts_and_decompositions_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in inductor's own code of ConvNeXt and MobileNet on an H200 (torch 2.11)."""
    sources: list[str] = []
    make = compiler.make_program

    def keep(source: str, *rest: Any) -> Any:
        sources.append(source)
        return make(source, *rest)

    monkeypatch.setattr(compiler, "make_program", keep)
    images = torch.randn(8, 64, 32, 32).to(memory_format=torch.channels_last)
    analysis = fxmem.analyze(Images(), images, gpu="h100", compile=True, autocast="bf16")
    assert analysis.setup.compile == "compiled"
    forward, backward = sources
    # cuDNN lays its results out as its operands are, channels last.
    assert "(8, 128, 32, 32), (131072, 1, 4096, 128)" in forward
    assert "(8, 64, 32, 32), (65536, 1, 2048, 64)" in forward
    # Gradients of biases are inductor's own sums, not the convolution's.
    assert "[True, True, True]" not in backward
    assert "[True, True, False]" in backward

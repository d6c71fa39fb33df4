"""FX106 on a step in one checkpoint, and on the same in a checkpoint for each part."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.advice.checkpoints import find_wide_checkpoints
from fxmem.analysis import Analysis

_LAYERS = 8


class Layers(nn.Module):
    """Layers that run as they are, in one checkpoint, or each in its own."""

    def __init__(self, way: str, width: int = 256) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width))
            for _ in range(_LAYERS)
        )  # fmt: skip

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "one":
            result: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return result
        if self.way == "plain":
            return self.run(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def analyze(way: str) -> Analysis:
    return fxmem.analyze(Layers(way), "16384x256")


def test_a_checkpoint_around_all_saves_nothing_and_around_each_does() -> None:
    plain, one, each = map(analyze, ("plain", "one", "each"))
    assert one.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.02)
    (finding,) = find_wide_checkpoints(one)
    saved_bytes = one.peak_bytes - each.peak_bytes
    # Its parts end where little goes across; where they begin, what they pass is counted at once.
    assert 0.9 * saved_bytes < finding.saving_bytes < 1.02 * saved_bytes
    assert finding.source is not None and finding.source.function == "forward"
    assert "8 parts of checkpoint" in finding.change
    for other in (plain, each):
        assert [f for f in find_wide_checkpoints(other) if f.saving_bytes > 1 << 20] == []

"""Models whose branches can run in several orders."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoBranches(nn.Module):
    """The second branch makes most on its way; the first one's result is there meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 32, 3, padding=1)
        self.widen = nn.Conv2d(3, 64, 3, padding=1)
        self.shrink = nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.narrow(x)
        other = self.shrink(self.widen(x))
        return kept.mean(1) + other.mean(1)


class Inception(nn.Module):
    """Three branches of a stem, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.Conv2d(16, 32, 1)
        self.second = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1))
        self.third = nn.Sequential(nn.Conv2d(16, 96, 1), nn.ReLU(), nn.Conv2d(96, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        branches = [self.first(x), self.second(x), self.third(x)]
        return torch.cat(branches, 1)


class Resolutions(nn.Module):
    """Branches of several resolutions that are exchanged, as HRNet has them."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.high = nn.Conv2d(3, 16, 3, padding=1)
        self.low = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.highs = nn.ModuleList(self._make_branch(16) for _ in range(stages))
        self.lows = nn.ModuleList(self._make_branch(32) for _ in range(stages))
        self.up = nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(stages))
        self.down = nn.ModuleList(nn.Conv2d(16, 32, 3, 2, 1) for _ in range(stages))

    @staticmethod
    def _make_branch(width: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        high = self.high(x)
        low = self.low(high)
        stages = zip(self.highs, self.lows, self.up, self.down, strict=True)
        for high_branch, low_branch, up, down in stages:
            high, low = high + high_branch(high), low + low_branch(low)
            raised = nn.functional.interpolate(up(low), size=high.shape[2:])
            high, low = (high + raised).relu(), (low + down(high)).relu()
        return high.mean((1, 2, 3)) + low.mean((1, 2, 3))

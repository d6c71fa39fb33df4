"""Modules that hold a value longer than they need it, and the same with a ``del``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Spec


class Wide(nn.Module):
    """Makes its input wide and narrow again, in a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 512, bias=False)
        self.down = nn.Linear(512, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 1536, bias=False)
        self.wide = Wide()


class Straight(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 0.5
        summed = hidden.view(-1, 24, 64).sum(1)
        y = torch.cat([summed, summed])
        return self.wide(y)


class StraightDel(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 0.5
        summed = hidden.view(-1, 24, 64).sum(1)
        del hidden
        y = torch.cat([summed, summed])
        return self.wide(y)


class Loop(Base):
    """Each round holds the value of the one before until it makes its own."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            hidden = self.first(x) + 1.0
            y = hidden.view(-1, 24, 64).amax(1)
            x = torch.cat([y] * 48).cos()[: len(x)]
        return self.wide(x)


class LoopDel(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            hidden = self.first(x) + 1.0
            y = hidden.view(-1, 24, 64).amax(1)
            del hidden
            x = torch.cat([y] * 48).cos()[: len(x)]
        return self.wide(x)


class Changed(Base):
    """The value is changed in place, under the same name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = F.relu(hidden, inplace=True)
        hidden.mul_(2)
        y = hidden.view(-1, 24, 64).sum(1)
        return self.wide(torch.cat([y, y]))


class ChangedDel(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = F.relu(hidden, inplace=True)
        hidden.mul_(2)
        y = hidden.view(-1, 24, 64).sum(1)
        del hidden
        return self.wide(torch.cat([y, y]))


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], str, str, tuple[str, ...]]

INPUT = (Spec((256, 64)),)
PAIRS: dict[str, Pair] = {
    "straight": (Straight, StraightDel, "mul", "hidden", ("train",)),
    "loop": (Loop, LoopDel, "add", "hidden", ("infer",)),
    "changed": (Changed, ChangedDel, "first", "hidden", ("infer",)),
}
"""By name: the module, the same with a ``del``, the node and the variable of the value, modes."""

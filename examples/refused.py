"""Models that an analysis refuses, each for a reason of its own: see docs/refusals.md.

fxmem analyze 'examples/refused.py:Branch(positive=True)' --input 32x64
fxmem analyze examples/refused.py:Select --input 32x64 --size-hint 16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """One layer, for the others to look at values around it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)


class Branch(Model):
    """Goes one way or the other by a value; or by its argument.

    Args:
        positive: Which way; None lets the data decide, and is refused.
    """

    def __init__(self, positive: bool | None = None) -> None:
        super().__init__()
        self.positive = positive

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        if self.positive is not None:
            return torch.relu(y) if self.positive else y
        if y.mean() > 0:
            y = torch.relu(y)
        return y


class Select(Model):
    """Goes on with some of the rows only; how many, the data say."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0).flatten()
        return self.head(x[rows])


class Number(Model):
    """Takes a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.max())
        return self.head(x) * scale

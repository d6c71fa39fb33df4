"""Modules that are written twice: as most people would, and with one operation in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Spec


class Convolutions(nn.Module):
    """Forward's frame holds the first result until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 4, 3, padding=1)

    def activate(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        active = self.activate(wide)
        return self.second(active)


class ConvolutionsInPlace(Convolutions):
    def activate(self, x: Tensor) -> Tensor:
        return F.relu(x, inplace=True)


class Dropped(Convolutions):
    def activate(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class DroppedInPlace(Convolutions):
    def activate(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training, inplace=True)


class Swish(Convolutions):
    """Backward needs the input, so only inference can do it in place."""

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(x)


class SwishInPlace(Convolutions):
    def activate(self, x: Tensor) -> Tensor:
        return F.silu(x, inplace=True)


def make_leaky(*, inplace: bool) -> nn.Module:
    """Backward keeps the inputs of leaky ReLU, and the results where it is in place."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=inplace),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Sigmoid(),
    )


class Residual(nn.Module):
    """The sum's first operand is needed later, and its second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 256, bias=False)
        self.block = nn.Linear(256, 256, bias=False)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.block(x)
        return self.add(x, y).mean(-1) + x.amax(-1)


class ResidualInPlace(Residual):
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x)


class Shifted(nn.Module):
    """Backward needs nothing of the two largest, so training peaks where both are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)

    def shift(self, x: Tensor) -> Tensor:
        return 1.0 + x

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.first(x)).mean((2, 3))


class ShiftedInPlace(Shifted):
    def shift(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


class Attention(nn.Module):
    """Scores are scaled and masked before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def scale(self, scores: Tensor) -> Tensor:
        return scores / 4.0

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.mask, float("-inf"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        scaled = self.scale(scores)
        hidden = self.hide(scaled)
        return hidden.softmax(-1) @ v


class AttentionScaledInPlace(Attention):
    def scale(self, scores: Tensor) -> Tensor:
        return scores.div_(4.0)


class AttentionHiddenInPlace(Attention):
    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill_(self.mask, float("-inf"))


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[Spec, ...], str, str]

IMAGE = (Spec((4, 3, 32, 32)),)
PAIRS: dict[str, Pair] = {
    "relu": (Convolutions, ConvolutionsInPlace, IMAGE, "relu", "relu_"),
    "dropout": (Dropped, DroppedInPlace, IMAGE, "dropout", "F.dropout(inplace=True)"),
    "silu": (Swish, SwishInPlace, IMAGE, "silu", "F.silu(inplace=True)"),
    "leaky_relu": (
        lambda: make_leaky(inplace=False),
        lambda: make_leaky(inplace=True),
        IMAGE,
        "1",
        "LeakyReLU(inplace=True)",
    ),
    "shift": (Shifted, ShiftedInPlace, IMAGE, "add", "add_"),
    "residual": (Residual, ResidualInPlace, (Spec((64, 16)),), "add", "add_"),
    "div": (Attention, AttentionScaledInPlace, (Spec((8, 64, 16)),), "div", "div_"),
    "masked_fill": (
        Attention,
        AttentionHiddenInPlace,
        (Spec((8, 64, 16)),),
        "masked_fill",
        "masked_fill_",
    ),
}
"""By name: the module, the same with a change, its inputs, the changed node, and the call."""

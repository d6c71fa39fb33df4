"""Modules that are run twice: as most people would write them, and with one operation in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Spec


class Convolutions(nn.Module):
    """Forward's frame holds the first result until it returns."""

    def __init__(self, activate: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 4, 3, padding=1)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        active = self.activate(wide, self.training)
        return self.second(active)


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

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 256, bias=False)
        self.block = nn.Linear(256, 256, bias=False)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.block(x)
        return self.add(x, y).mean(-1) + x.amax(-1)


class Shifted(nn.Module):
    """Backward needs nothing of the two largest, so training peaks where both are there."""

    def __init__(self, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.first(x)).mean((2, 3))


class Attention(nn.Module):
    """Scores are scaled and masked before the softmax, one of both in place if so named."""

    def __init__(self, in_place: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).triu(1))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        scaled = scores.div_(4.0) if self.in_place == "div_" else scores / 4.0
        hide = scaled.masked_fill_ if self.in_place == "masked_fill_" else scaled.masked_fill
        hidden = hide(self.mask, float("-inf"))
        return hidden.softmax(-1) @ v


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[Spec, ...], str, str]

IMAGE = (Spec((4, 3, 32, 32)),)
SCORES = (Spec((8, 64, 16)),)
PAIRS: dict[str, Pair] = {
    "relu": (
        lambda: Convolutions(lambda x, _: F.relu(x)),
        lambda: Convolutions(lambda x, _: F.relu(x, inplace=True)),
        *(IMAGE, "relu", "relu_"),
    ),
    "dropout": (
        lambda: Convolutions(lambda x, training: F.dropout(x, 0.5, training)),
        lambda: Convolutions(lambda x, training: F.dropout(x, 0.5, training, inplace=True)),
        *(IMAGE, "dropout", "F.dropout(inplace=True)"),
    ),
    # Backward needs the input, so only inference can do it in place.
    "silu": (
        lambda: Convolutions(lambda x, _: F.silu(x)),
        lambda: Convolutions(lambda x, _: F.silu(x, inplace=True)),
        *(IMAGE, "silu", "F.silu(inplace=True)"),
    ),
    "leaky_relu": (
        partial(make_leaky, inplace=False),
        partial(make_leaky, inplace=True),
        *(IMAGE, "1", "LeakyReLU(inplace=True)"),
    ),
    "shift": (
        lambda: Shifted(lambda x: 1.0 + x),
        lambda: Shifted(lambda x: x.add_(1.0)),
        *(IMAGE, "add", "add_"),
    ),
    "residual": (
        lambda: Residual(lambda x, y: x + y),
        lambda: Residual(lambda x, y: y.add_(x)),
        *((Spec((64, 16)),), "add", "add_"),
    ),
    "div": (Attention, partial(Attention, "div_"), SCORES, "div", "div_"),
    "masked_fill": (
        Attention,
        partial(Attention, "masked_fill_"),
        *(SCORES, "masked_fill", "masked_fill_"),
    ),
}
"""By name: the module, the same with a change, its inputs, the changed node, and the call."""

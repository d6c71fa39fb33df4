"""A planned model takes other batches and lengths than it was traced with: the same bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leanest import apply_leanest
from planned_models import Stages, UNet
from running import Runs
from steps import check_same_step, sum_squares
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem


def make_convolutions() -> nn.Module:
    """The batch's size in a view, a mean over what is left."""

    def run(net: Any, x: Tensor) -> Tensor:
        y = F.relu(net.norm(net.first(x)))
        y = F.dropout(torch.tanh(net.second(y)), 0.2, net.training)
        y = F.adaptive_avg_pool2d(y, 4)
        return net.head(y.view(y.shape[0], -1))  # type: ignore[no-any-return]

    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return Runs(run, first=first, norm=nn.BatchNorm2d(8), second=second, head=nn.Linear(128, 5))


class Positions(nn.Module):
    """Embedded positions by a slice and by arange; causal attention by the length."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(40, width)
        self.table = nn.Parameter(torch.randn(64, width))
        self.places = nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.words(ids) + self.table[:length] + self.places(torch.arange(ids.shape[1]))
        split = self.inner(self.norm(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        x = x + self.outer((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        causal = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return x + y.transpose(1, 2).reshape(batch, length, -1)


def make_encoder(width: int = 16) -> nn.Module:
    """PyTorch's own transformer, with a mask of the length."""

    def run(net: Any, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return net.encoder(net.words(ids), mask=mask).mean(1)  # type: ignore[no-any-return]

    layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
    return Runs(run, words=nn.Embedding(40, width), encoder=nn.TransformerEncoder(layer, 2))


def make_recurrent(width: int = 12) -> nn.Module:
    """A state as long as the batch."""

    def run(net: Any, ids: Tensor) -> Tensor:
        state = torch.zeros(1, ids.size(0), net.rnn.hidden_size)
        y, _ = net.rnn(net.words(ids), state)
        return net.feed(y)  # type: ignore[no-any-return]

    feed = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 4))
    rnn = nn.GRU(width, width, batch_first=True)
    return Runs(run, words=nn.Embedding(40, width), rnn=rnn, feed=feed)


class Patches(nn.Module):
    """Patches cut and put together by the sizes' quotients, as einops does."""

    def __init__(self, patch: int = 4, width: int = 16) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU())
        self.back = nn.Linear(64, 3 * patch * patch)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        p = self.patch
        y = x.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        y = self.back(self.mix(self.embed(y.reshape(n, (h // p) * (w // p), c * p * p))))
        y = y.reshape(n, h // p, w // p, c, p, p).permute(0, 3, 1, 4, 2, 5)
        return y.reshape(n, c, h, w).expand(n, c, h, w) + torch.zeros_like(x)


def draw_images(*sizes: tuple[int, int, int]) -> list[Tensor]:
    return [torch.randn(n, 3, height, width) for n, height, width in sizes]


def draw_words(*sizes: tuple[int, int]) -> list[Tensor]:
    return [torch.randint(0, 40, size) for size in sizes]


WORDS = ((6, 12), (2, 12), (6, 7), (1, 19), (3, 1))
CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor]]] = {
    "convolutions": (
        make_convolutions,
        draw_images((6, 16, 16), (2, 16, 16), (3, 8, 12), (1, 20, 16)),
    ),
    "positions": (Positions, draw_words(*WORDS)),
    "encoder": (make_encoder, draw_words(*WORDS)),
    "recurrent": (make_recurrent, draw_words(*WORDS)),
    "unet": (UNet, draw_images((2, 32, 32), (1, 32, 32), (5, 16, 32), (3, 64, 48))),
    "patches": (Patches, draw_images((4, 16, 16), (1, 16, 16), (7, 8, 12), (3, 32, 4))),
}
"""By name, a model and its inputs, the first of which it is traced with."""


@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("name", CASES)
def test_other_sizes_run_by_the_plan(name: str, style: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = Stages(make) if style == "modules" else make()
    planned = apply_leanest(model, (inputs[0],), style=style)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxmem.FxmemWarning)  # which a step without the plan gives
        for x in (*inputs, inputs[0]):
            check_same_step(model, planned, x, loss_of=sum_squares)
    assert style == "modules" or planned.plan_calls == len(inputs) + 1


class Decides(nn.Module):
    """Code that decides by a size, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(8, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.tanh(self.first(x)))
        length = x.shape[1]
        if self.kind == "if" and x.shape[0] > 4:
            y = y * 2
        elif self.kind == "loop":
            for at in range(length):
                y = y + at
        elif self.kind == "number":
            y = y / math.sqrt(length)
        elif self.kind == "equal" and x.shape[0] == length:
            y = y + y.transpose(0, 1)
        elif self.kind == "list":
            y = torch.stack([y[at] for at in range(x.shape[0])]).tanh()
        elif self.kind == "split":
            y = torch.cat([part.tanh() for part in y.split(2, 1)], 1)
        return self.last(torch.tanh(y))


DECISIONS = {
    "if": [(5, 3), (4, 3)],
    "loop": [(5, 3), (5, 4)],
    "number": [(5, 3), (5, 4)],
    "equal": [(5, 3), (3, 3)],
    "list": [(5, 3), (4, 3)],
    "split": [(5, 3), (5, 5)],
}
"""By kind, the sizes that it is traced with, and others for which the code does other things."""


@pytest.mark.parametrize("kind", DECISIONS)
def test_sizes_by_which_code_decides_otherwise_run_without_the_plan(kind: str) -> None:
    traced, other = (torch.randn(*size, 8) for size in DECISIONS[kind])
    torch.manual_seed(0)
    model = Decides(kind)
    planned = apply_leanest(model, (traced,))
    with pytest.warns(fxmem.FxmemWarning, match=r"dimension \d of x is not .*: this step runs"):
        check_same_step(model, planned, other, loss_of=sum_squares)
    check_same_step(model, planned, traced, loss_of=sum_squares)
    assert planned.plan_calls == 1


def test_modules_decide_for_themselves() -> None:
    torch.manual_seed(0)
    model = Stages(lambda: nn.Sequential(Decides("if"), Decides("loop")))
    planned = apply_leanest(model, (torch.randn(5, 3, 8),), style="modules")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxmem.FxmemWarning)
        check_same_step(model, planned, torch.randn(4, 6, 8), loss_of=sum_squares)

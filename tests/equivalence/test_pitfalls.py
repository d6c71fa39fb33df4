"""What goes wrong where a range is simply put under ``torch.utils.checkpoint``, and not in a plan.

``DistributedDataParallel`` is in ``test_surroundings.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from benchmarks.equivalence_measure import Baseline, list_plans

WIDTH = 16


def make_feed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Net(nn.Module):
    """A layer, a block that somebody puts under a checkpoint, and what is simple to plan."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.feed = nn.Linear(WIDTH, WIDTH), block, make_feed()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.block(self.first(x)))


class Norm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * torch.rand(x.shape, generator=self.generator))


class InPlace(nn.Module):
    def __init__(self, *, by_view: bool) -> None:
        super().__init__()
        self.layer, self.by_view = nn.Linear(WIDTH, WIDTH), by_view

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, WIDTH).mul_(0.5) if self.by_view else x.sigmoid_()
        return self.layer(x).tanh()


class Running(nn.Module):
    """Compares with a mean that it updates: how many rows it keeps depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        chosen = y[y.mean(-1) > self.mean]
        with torch.no_grad():
            self.mean += 0.5
        return torch.sin(y) + chosen.cos().sum(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        cache.append(k)
        return torch.tanh(q @ torch.cat(cache).transpose(-2, -1)).sum(-1, keepdim=True) + v


class Cached(nn.Module):
    """Two blocks that append to one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other, self.feed = Attention(), Attention(), make_feed()

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        return self.feed(self.other(self.block(x, cache), cache))


class Casting(nn.Module):
    """A block within autocast; backward is outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.feed = nn.Linear(WIDTH, WIDTH), make_feed(), make_feed()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.block(F.gelu(self.first(x)))
        return self.feed(y.float())


PITFALLS: dict[str, Callable[[], nn.Module]] = {
    "statistics": lambda: Net(Norm()),
    "counted statistics": lambda: Net(Norm(momentum=None)),
    "own generator": lambda: Net(OwnGenerator()),
    "in place": lambda: Net(InPlace(by_view=False)),
    "in place by a view": lambda: Net(InPlace(by_view=True)),
    "data": lambda: Net(Running()),
    "cache": Cached,
    "autocast": Casting,
}
"""Models of which a block under ``torch.utils.checkpoint`` would fail, or other numbers result."""


def make_net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PITFALLS[name]()


def iterate_plans(model: nn.Module, x: Tensor) -> Iterator[fxmem.Plan]:
    analysis = fxmem.analyze(model, (x,), device="cpu", optimizer="adam", size_hint=4)
    for style in ("graph", "modules") if analysis.frontend == "fx" else ("modules",):
        for plan, _ in list_plans(analysis, style, points=2, drawn=1, time_limit_s=0.3):
            yield plan


@pytest.mark.parametrize("name", PITFALLS)
def test_with_a_plan_all_is_equal(name: str) -> None:
    model, x = make_net(name).train(), torch.randn(8, WIDTH)
    baseline = Baseline(model, (x,), {})
    held = [baseline.hold(plan) for plan in iterate_plans(model, x)]
    assert len(held) >= 2 and any(h.plan.segments for h in held)
    assert [h.difference for h in held if h.difference] == []
    assert [h.error for h in held if abs(h.error or 1.0) > 0.01 and h.error] == []

"""Pitfalls of ranges simply put under ``torch.utils.checkpoint``, which plans avoid.

``DistributedDataParallel`` is in ``test_surroundings.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from benchmarks.equivalence_measure import Baseline, list_plans

WIDTH = 16


def make_feed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def make_net(block: nn.Module) -> nn.Module:
    """A layer, a block that somebody puts under a checkpoint, and what is simple to plan."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, make_feed())


def make_block(run: Callable[[Any, Tensor], Tensor], **held: Any) -> nn.Module:
    return make_net(Runs(run, layer=nn.Linear(WIDTH, WIDTH), **held))


def normalise(block: Any, x: Tensor) -> Tensor:
    return torch.tanh(block.norm(block.layer(x)))


def draw_by_itself(block: Any, x: Tensor) -> Tensor:
    return torch.sin(x * torch.rand(x.shape, generator=block.generator))


def change_in_place(block: Any, x: Tensor) -> Tensor:
    return block.layer(x.sigmoid_()).tanh()  # type: ignore[no-any-return]


def change_a_view(block: Any, x: Tensor) -> Tensor:
    return block.layer(x.view(-1, WIDTH).mul_(0.5)).tanh()  # type: ignore[no-any-return]


def choose_by_mean(block: Any, x: Tensor) -> Tensor:
    """Compares with a mean that it updates: how many rows it keeps depends on the data."""
    y = block.layer(x)
    chosen = y[y.mean(-1) > block.mean]
    with torch.no_grad():
        block.mean += 0.5
    return torch.sin(y) + chosen.cos().sum(0)


def attend(block: Any, x: Tensor, cache: list[Tensor]) -> Tensor:
    q, k, v = block.qkv(x).chunk(3, -1)
    cache.append(k)
    return torch.tanh(q @ torch.cat(cache).transpose(-2, -1)).sum(-1, keepdim=True) + v


def make_cached() -> nn.Module:
    """Two blocks that append to one cache."""

    def run(model: Any, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        return model.feed(model.other(model.block(x, cache), cache))  # type: ignore[no-any-return]

    block, other = (Runs(attend, qkv=nn.Linear(WIDTH, 3 * WIDTH)) for _ in range(2))
    return Runs(run, block=block, other=other, feed=make_feed())


def make_casting() -> nn.Module:
    """A block within autocast; backward is outside of it."""

    def run(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.block(F.gelu(model.first(x)))
        return model.feed(y.float())  # type: ignore[no-any-return]

    return Runs(run, first=nn.Linear(WIDTH, WIDTH), block=make_feed(), feed=make_feed())


PITFALLS: dict[str, Callable[[], nn.Module]] = {
    "statistics": lambda: make_block(normalise, norm=nn.BatchNorm1d(WIDTH)),
    "counted statistics": lambda: make_block(normalise, norm=nn.BatchNorm1d(WIDTH, momentum=None)),
    "own generator": lambda: make_block(draw_by_itself, generator=torch.Generator().manual_seed(3)),
    "in place": lambda: make_block(change_in_place),
    "in place by a view": lambda: make_block(change_a_view),
    "data": lambda: make_block(choose_by_mean, mean=nn.Buffer(torch.zeros(()))),
    "cache": make_cached,
    "autocast": make_casting,
}
"""Models of which a block under ``torch.utils.checkpoint`` would fail, or other numbers result."""


def iterate_plans(model: nn.Module, x: Tensor) -> Iterator[fxmem.Plan]:
    analysis = fxmem.analyze(model, (x,), device="cpu", optimizer="adam", size_hint=4)
    for style in ("graph", "modules") if analysis.frontend == "fx" else ("modules",):
        for plan, _ in list_plans(analysis, style, points=2, drawn=1, time_limit_s=0.3):
            yield plan


@pytest.mark.parametrize("name", PITFALLS)
def test_with_a_plan_all_is_equal(name: str) -> None:
    torch.manual_seed(0)
    model, x = PITFALLS[name]().train(), torch.randn(8, WIDTH)
    baseline = Baseline(model, (x,), {})
    held = [baseline.hold(plan) for plan in iterate_plans(model, x)]
    assert len(held) >= 2 and any(h.plan.segments for h in held)
    assert [h.difference for h in held if h.difference] == []
    assert [h.error for h in held if abs(h.error or 1.0) > 0.01 and h.error] == []

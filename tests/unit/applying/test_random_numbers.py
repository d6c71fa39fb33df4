"""Segments that draw random numbers which their plan does not know of."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from fxmem.applying.random_numbers import RandomNumbers, iterate_generators
from fxmem.applying.runtime import checkpoint
from fxmem.planning.plan import Plan, Segment

WIDTH = 64


class Block(nn.Module):
    """Three ways to leave something out, each with a rate that training may set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.rate, self.depth_rate = 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.linear(x)), self.rate, self.training)
        y = self.drop(y).sin()
        if self.depth_rate:
            y = y * (torch.rand(len(y), 1) > self.depth_rate)
        return x + y.exp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def set_dropout(block: Any, rate: float) -> None:
    block.drop.p = rate


def set_rate(block: Any, rate: float) -> None:
    block.rate = rate


def set_depth_rate(block: Any, rate: float) -> None:
    block.depth_rate = rate


def take_steps(model: nn.Module, set_it: Any) -> list[Tensor]:
    torch.manual_seed(2)
    for rate in (0.0, 0.2, 0.5):
        for block in model.blocks:  # type: ignore[union-attr]
            set_it(block, rate)
        loss = model(torch.ones(256, WIDTH)).square().mean()
        torch.rand(3)  # what others draw between forward and backward
        loss.backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("set_it", [set_dropout, set_rate, set_depth_rate])
def test_a_rate_may_be_raised_while_a_model_trains(style: str, set_it: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    analysis = fxmem.analyze(model, (f"256x{WIDTH}",), device="cpu")
    plan = fxmem.pareto(analysis, style=style, time_limit_s=1)[-1]
    assert plan.segments
    expected = take_steps(copy.deepcopy(model), set_it)
    is_read = style == "graph" and set_it is not set_dropout  # by code that a graph has no more
    told = pytest.warns(fxmem.FxmemWarning, match="is not what it was for the plan, and")
    with told if is_read else contextlib.nullcontext():
        assert all(map(torch.equal, take_steps(fxmem.apply(model, plan), set_it), expected))


@pytest.mark.parametrize("set_it", [set_dropout, set_rate, set_depth_rate])
def test_it_needs_no_plan_that_knows(set_it: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    segments = tuple(Segment("a", "b", 2, fqn=f"blocks.{at}") for at in range(3))
    planned = fxmem.apply(model, Plan("", 2, 1, segments=segments, style="modules"))
    expected = take_steps(copy.deepcopy(model), set_it)
    assert all(map(torch.equal, take_steps(planned, set_it), expected))


def test_a_second_run_leaves_the_generator_alone() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x.exp()).sin(), x)
    torch.manual_seed(7)
    between = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), between)
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)


def test_nothing_is_kept_where_nothing_is_drawn() -> None:
    numbers = RandomNumbers(iterate_generators([torch.ones(2)]))
    numbers.settle()
    assert numbers._begin == []
    numbers = RandomNumbers(iterate_generators([torch.ones(2)]))
    torch.rand(1)
    numbers.settle()
    assert [generator for generator, _ in numbers._begin] == [torch.default_generator]


def test_a_planned_model_is_analysed_for_a_gpu_without_one() -> None:
    model = Net()
    planned = fxmem.apply(model, fxmem.pareto(fxmem.analyze(model, f"8x{WIDTH}", device="cpu"))[-1])
    assert fxmem.analyze(planned, f"8x{WIDTH}", gpu="a100-40gb").peak_bytes > 0

"""Plans of graphs against plans of modules, on nets of blocks that are drawn at random.

``FXMEM_EXAMPLES=500`` tries more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import fxmem
from examples.gpt import GPT
from fxmem.planning.planner import make_problem
from fxmem.planning.prepared_step import PlanningStep, prepare_step
from fxmem.planning.strategies.builtin import search
from fxmem.planning.strategies.problem import Candidate, Goal, run_strategy

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))
WIDTH = 64
ACTIVATIONS: Sequence[Callable[[Tensor], Tensor]] = (torch.tanh, torch.relu, torch.sigmoid)


class Layers(nn.Module):
    """Two layers with an activation between, and functions around them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = WIDTH * rng.choice((1, 2, 4))
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if rng.random() < 0.5 else nn.Identity()
        self.activation = rng.choice(ACTIVATIONS)
        self.ends = rng.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.activation(self.up(self.norm(x))))
        return torch.exp(-x * x) if self.ends else x


class Mixing(nn.Module):
    """Attention of one head, written out."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1 if rng.random() < 0.3 else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-2, -1), dim=-1)
        return self.drop(weights) @ self.value(x)


class Block(nn.Module):
    """Some of these one after the other, each with a shortcut or without; or blocks likewise."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.parts = nn.ModuleList()
        for kind in kinds:
            made = Block(kind[1:], seed + 1) if kind[1:] else (Layers, Mixing)[kind == "m"](rng)
            self.parts.append(made)
        self.shortcuts = [rng.random() < 0.6 for _ in kinds]

    def forward(self, x: Tensor) -> Tensor:
        for part, is_added in zip(self.parts, self.shortcuts, strict=True):
            x = x + part(x) if is_added else part(x)
        return x


def draw_net(seed: int) -> nn.Module:
    """Copies of a block or two, so that there are patterns, between a stem and a head."""
    rng = random.Random(seed)
    kinds = [[rng.choice(("l", "m", "bl", "blm", "bmm")) for _ in range(rng.randint(1, 2))]]
    kinds.append(rng.choice((kinds[0], ["l"])))
    blocks = [Block(kinds[at % 2], seed) for at in range(rng.randint(2, 5))]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, rng.choice((8, 2048))))


def find_front(step: PlanningStep, *, by_flops: bool) -> tuple[Candidate, ...]:
    problem = make_problem(step, Goal(by_flops=by_flops))
    run_strategy(problem, search)
    return problem.front


def check(net: nn.Module, spec: str, *, by_flops: bool) -> None:
    analysis = fxmem.analyze(net, (spec,), device="cpu")
    step, wrapped = (prepare_step(analysis, style) for style in ("graph", "modules"))
    of_graph, of_modules = (find_front(one, by_flops=by_flops) for one in (step, wrapped))
    for plan in of_modules:
        worse = [c for c in of_graph if c.peak_bytes > plan.peak_bytes and c.cost > plan.cost]
        assert not worse, (plan, worse)


@pytest.mark.parametrize("seed", range(EXAMPLES or 2))
def test_no_plan_of_modules_beats_those_of_the_graph(seed: int) -> None:
    check(draw_net(seed), f"16x64x{WIDTH}", by_flops=seed % 2 == 1)


@pytest.mark.parametrize("by_flops", [False, True], ids=["time", "FLOPs"])
def test_whole_modules_are_pieces_of_plans(by_flops: bool) -> None:
    """Here plans of modules once took less of both, where attention lies within each block."""
    check(GPT(), "4x512:int64", by_flops=by_flops)

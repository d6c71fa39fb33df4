"""The search against every set of nested regions that there is, on models small enough for it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import median

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.planning.model.costs import CPU_ROOFLINE, price_operations
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.recomputation import SegmentRange
from fxmem.planning.model.score import Scorer
from fxmem.planning.strategies.bound import bound_cost
from fxmem.planning.strategies.builtin import search
from fxmem.planning.strategies.problem import Candidate, PlanProblem, prune, run_strategy

BATCH = 16384
WIDTHS = (64, 128, 256, 512)
SKIPS = 0.35
"""The share of steps that take an earlier result, where there is one of the shape."""
ACTIVATIONS = (torch.tanh, torch.sigmoid, torch.square, torch.relu, torch.exp)


class Drawn(nn.Module):
    """Layers and functions, with sums and products of what was made before where ``skips`` says."""

    def __init__(self, seed: int, steps: int, skips: bool) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int]] = []
        widths = [rng.choice(WIDTHS)]
        self.width = widths[0]
        for _ in range(steps):
            alike = [at for at, width in enumerate(widths[:-1]) if width == widths[-1]]
            if self.layers and skips and alike and rng.random() < SKIPS:
                self.steps.append((rng.choice(("add", "multiply")), rng.choice(alike)))
                widths.append(widths[-1])
            elif not self.layers or rng.random() < 0.4:
                widths.append(rng.choice((widths[0], rng.choice(WIDTHS))))
                self.steps.append(("layer", len(self.layers)))
                self.layers.append(nn.Linear(widths[-2], widths[-1]))
            else:
                self.steps.append(("call", rng.randrange(len(ACTIVATIONS))))
                widths.append(widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for kind, at in self.steps:
            if kind == "add":
                made.append(made[-1] + made[at])
            elif kind == "multiply":
                made.append(made[-1] * made[at])
            elif kind == "layer":
                made.append(self.layers[at](made[-1]))
            else:
                made.append(ACTIVATIONS[at](made[-1]))
        return made[-1]


@cache
def list_plans(start: int, stop: int, depth: int) -> tuple[tuple[SegmentRange, ...], ...]:
    """Every set of regions apart from each other among some nodes, nested up to a depth."""
    if depth == 0 or start >= stop:
        return ((),)
    plans = [*list_plans(start + 1, stop, depth)]
    for end in range(start + 1, stop + 1):
        insides = [
            children
            for children in list_plans(start, end, depth - 1)
            if (start, end) not in [(child.start, child.stop) for child in children]
        ]
        rest = list_plans(end, stop, depth)
        plans += [
            (SegmentRange(start, end, inner), *others) for inner in insides for others in rest
        ]
    return tuple(plans)


@dataclass(frozen=True)
class Comparison:
    """The plans found for one model, and all that exist."""

    facts: StepIndex
    costs: Sequence[float]
    found: tuple[Candidate, ...]
    best: tuple[Candidate, ...]

    def iterate_gaps(self) -> Iterator[float]:
        """For each budget that allows something new: what was found costs so much more.

        As a share of the optimum; endless where nothing was found that fits.
        """
        for best in self.best:
            fitting = [c.cost for c in self.found if c.peak_bytes <= best.peak_bytes]
            if best.cost:
                yield (min(fitting, default=inf) - best.cost) / best.cost
            else:
                assert min(fitting) == 0


def compare(seed: int, steps: int, skips: bool, depth: int) -> Comparison:
    model = Drawn(seed, steps, skips)
    analysis = analyze(model, (f"{BATCH}x{model.width}",), device="cpu")
    facts = build_index(analysis.graph)
    costs = price_operations(analysis.graph, CPU_ROOFLINE)
    limits = find_limits(facts)
    scorer = Scorer(facts, costs)
    plans = [p for p in list_plans(1, facts.nodes, depth) if all(map(limits.allows, p))]
    best = prune((Candidate(plan, *scorer.score(plan)) for plan in plans), lambda c: c.cost)
    problem = PlanProblem(facts, limits, costs)
    run_strategy(problem, search)
    return Comparison(facts, costs, problem.front, best)


def check(comparison: Comparison, worst: float) -> list[float]:
    """The gaps of one model, none of them above ``worst``; beside them what holds for each."""
    peaks = [candidate.peak_bytes for candidate in comparison.found]
    costs = [candidate.cost for candidate in comparison.found]
    assert peaks == sorted(set(peaks), reverse=True), "more cost, less memory"
    assert costs == sorted(set(costs))
    limits = find_limits(comparison.facts)
    for best in comparison.best:
        bound = bound_cost(comparison.facts, limits, comparison.costs, best.peak_bytes)
        assert bound <= best.cost * (1 + 1e-6)
    gaps = [*comparison.iterate_gaps()]
    assert max(gaps, default=0.0) <= worst, gaps
    return gaps


def test_every_set_of_regions_is_listed_once() -> None:
    """On two nodes, by hand: each alone or not, both under one region, and in it all but that."""
    apart = [
        (),
        (SegmentRange(0, 1),),
        (SegmentRange(1, 2),),
        (SegmentRange(0, 1), SegmentRange(1, 2)),
    ]
    assert sorted(map(repr, list_plans(0, 2, 1))) == sorted(
        map(repr, [*apart, (SegmentRange(0, 2),)])
    )
    assert sorted(map(repr, list_plans(0, 2, 2))) == sorted(
        map(repr, [*apart, *((SegmentRange(0, 2, inner),) for inner in apart)])
    )


@pytest.mark.parametrize("skips", [False, True], ids=["chains", "skips"])
def test_the_search_finds_the_cheapest_plan_for_every_budget(skips: bool) -> None:
    gaps = [
        gap
        for steps, depth in ((5, 3), (6, 2), (8, 1))
        for seed in range(3)
        for gap in check(compare(seed, steps, skips, depth), worst=0.25)
    ]
    assert len(gaps) >= 8
    assert median(gaps) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["chains", "skips"])
@pytest.mark.parametrize("steps, depth, models", [(5, 3, 60), (6, 2, 100), (7, 2, 30), (8, 2, 6)])
def test_the_search_on_more_models(steps: int, depth: int, models: int, skips: bool) -> None:
    gaps = [
        gap
        for seed in range(models)
        for gap in check(compare(1000 + seed, steps, skips, depth), worst=inf)
    ]
    met = [gap for gap in gaps if gap < inf]
    print(f"{len(gaps)} budgets, median {median(gaps):.2%}, worst {max(met):.2%}", end="")
    print(f", {len(gaps) - len(met)} not met")
    assert median(gaps) <= 0.02
    assert max(met) <= 0.5
    # Now and then the search misses the leanest plan, which takes several changes at once.
    assert len(gaps) - len(met) <= 0.05 * len(gaps)

"""The search among modules: what it finds against all choices, and the styles of plans."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.errors import InfeasibleError, UsageError
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.modules import ModuleChoice, list_modules
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import nest_spans
from fxmem.planning.outcome import find_planned_step
from fxmem.planning.plan import LimitKind
from fxmem.planning.strategies.problem import Candidate, PlanProblem, run_strategy
from fxmem.planning.strategies.whole_modules import choose_modules


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_model() -> nn.Module:
    return nn.Sequential(Block(64), Block(16), Block(128))


@pytest.fixture(scope="module")
def analysis() -> Any:
    return fxmem.analyze(make_model(), ("32x8",), device="cpu")


def gather(analysis: Any) -> tuple[StepIndex, tuple[ModuleChoice, ...], list[float]]:
    facts = build_index(analysis.graph, keeps_frames=True)
    choices, _ = list_modules(facts, find_limits(facts))
    costs = [float(operation.flops) + 1 for operation in analysis.graph.operations]
    return facts, choices, costs


def find_module_front(
    facts: StepIndex, choices: tuple[ModuleChoice, ...], costs: list[float]
) -> tuple[Candidate, ...]:
    problem = PlanProblem(facts, find_limits(facts), costs, modules=choices, whole_modules=True)
    run_strategy(problem, choose_modules)
    return problem.front


def test_the_front_is_that_of_all_choices(analysis: Any) -> None:
    facts, choices, costs = gather(analysis)
    assert len(choices) == 12
    scorer = Scorer(facts, costs)
    scores = {
        scorer.score(nest_spans(span for choice in chosen for span in choice.spans))
        for size in range(len(choices) + 1)
        for chosen in combinations(choices, size)
    }
    best = sorted(
        (peak, cost)
        for peak, cost in scores
        if not any(p <= peak and c <= cost and (p, c) != (peak, cost) for p, c in scores)
    )
    found = find_module_front(facts, choices, costs)
    assert sorted((c.peak_bytes, c.cost) for c in found) == best


def test_a_front_falls_as_it_costs_more(analysis: Any) -> None:
    front = find_module_front(*gather(analysis))
    assert front[0].segments == ()
    assert front[0].peak_bytes == analysis.peak_bytes
    for one, other in pairwise(front):
        assert one.cost < other.cost and one.peak_bytes > other.peak_bytes


def test_without_modules_nothing_is_computed_again(analysis: Any) -> None:
    facts, _, costs = gather(analysis)
    (only,) = find_module_front(facts, (), costs)
    assert only.segments == ()


def test_segments_are_calls_of_modules(analysis: Any) -> None:
    names = dict(make_model().named_modules())
    for plan in fxmem.pareto(analysis, style="modules"):
        assert plan.style == "modules" and plan.fx_graph is None
        for segment in plan.segments:
            assert segment.fqn in names
            assert all(child.fqn.startswith(f"{segment.fqn}.") for child in segment.children)
    assert plan.segments


def test_a_graph_is_rewritten_where_there_is_one(analysis: Any) -> None:
    assert fxmem.pareto(analysis)[0].style == "graph"
    recorded = fxmem.analyze(make_model(), ("32x8",), device="cpu", frontend="record")
    assert fxmem.pareto(recorded)[0].style == "modules"


def test_a_graph_that_cannot_be_rewritten_is_told() -> None:
    recorded = fxmem.analyze(make_model(), ("32x8",), device="cpu", frontend="record")
    with pytest.raises(UsageError) as caught:
        fxmem.plan(recorded, max_overhead=0.1, style="graph")
    assert str(caught.value) == (
        "this model's graph cannot be rewritten: record was asked for (style='modules')"
    )


def test_an_unknown_style_is_told(analysis: Any) -> None:
    with pytest.raises(UsageError) as caught:
        fxmem.pareto(analysis, style="blocks")
    assert str(caught.value) == "unknown style 'blocks' (graph or modules)"


def test_limits_of_a_plan_keep_to_it(analysis: Any) -> None:
    least = fxmem.pareto(analysis, style="modules")[-1].peak_bytes
    by_time = fxmem.plan(analysis, max_overhead=0.05, style="modules")
    by_flops = fxmem.plan(analysis, max_overhead_flops=0.05, style="modules")
    by_budget = fxmem.plan(analysis, budget=least, style="modules")
    assert by_time.overhead <= 0.05 and by_flops.overhead_flops <= 0.05
    assert by_budget.peak_bytes <= least
    assert any(segment.saving_bytes for segment in by_budget.segments)
    with pytest.raises(InfeasibleError, match="the leanest takes"):
        fxmem.plan(analysis, budget=least // 2, style="modules")


def test_modules_that_cannot_run_twice_are_told() -> None:
    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = nn.Sequential(Block(64), Counting(64))
    told = fxmem.pareto(
        fxmem.analyze(model, ("32x8",), device="cpu"), style="modules", time_limit_s=1
    )[0].limits
    assert [(limit.node, limit.kind, limit.reason) for limit in told] == [
        ("1", LimitKind.MODULE, "it changes what its module holds")
    ]
    assert told[0].source is not None


def test_what_a_fit_replays_is_the_step_with_the_modules() -> None:
    gpu = fxmem.analyze(make_model(), ("32x8",), gpu="t4")
    plan = fxmem.pareto(gpu, style="modules")[-1]
    planned = find_planned_step(gpu, plan)
    assert planned is not None and planned.peak.nbytes == plan.peak_bytes

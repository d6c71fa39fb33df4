"""Modules that may be recomputed, the search among them, and the plans of style ``modules``."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from running import Running
from torch import Tensor, nn

import fxmem
from fxmem.errors import InfeasibleError, UsageError
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import ModuleChoice, find_limits, list_modules
from fxmem.planning.model.recomputation import nest_spans
from fxmem.planning.model.score import Scorer
from fxmem.planning.plan import LimitKind
from fxmem.planning.strategies.builtin import choose_modules
from fxmem.planning.strategies.problem import PlanProblem, run_strategy


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        active = torch.tanh(hidden)
        return self.down(active)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def look_up(model: nn.Module) -> tuple[StepIndex, dict[str, ModuleChoice], Any]:
    step = build_index(fxmem.analyze(model, ("4x8",), device="cpu").graph, keeps_frames=True)
    choices, reasons = list_modules(step, find_limits(step))
    return step, {choice.fqn: choice for choice in choices}, reasons


def test_modules_of_any_depth_are_choices() -> None:
    step, choices, reasons = look_up(nn.Sequential(Block(Mlp()), Block(Mlp()), nn.Linear(8, 1)))
    assert not reasons
    assert list(choices) == [
        *("0", "0.norm", "0.inner", "0.inner.up", "0.inner.down"),
        *("1", "1.norm", "1.inner", "1.inner.up", "1.inner.down", "2"),
    ]
    start, stop = choices["0.inner"].spans[0]
    names = [node.name for node in step.graph.nodes[start:stop]]
    assert names == ["0.inner.up", "0.inner.tanh", "0.inner.down"]


def test_all_calls_of_a_module_go_together() -> None:
    shared = Mlp()
    _, choices, _ = look_up(nn.Sequential(Block(shared), Block(shared)))
    assert len(choices["0.inner"].spans) == 2
    assert "1.inner" not in choices  # the same module has one name
    for model in (nn.Sequential(Mlp()), shared), (nn.Sequential(shared), shared):
        _, choices, _ = look_up(nn.Sequential(*model, nn.Linear(8, 1)))
        assert "0" in choices and "0.0" not in choices  # the outermost that shares calls


def draw(model: Any, x: Tensor) -> Tensor:
    return x * torch.rand(8, generator=torch.Generator())


def average(model: Any, x: Tensor) -> Tensor:
    y = x - model.steps
    model.steps.mul_(0.9)
    return y + model.steps


def average_first(model: Any, x: Tensor) -> Tensor:
    model.steps.mul_(0.9)
    return x + model.steps


def add(model: Any, x: Tensor) -> Tensor:
    x += 1
    return x.exp()


beside: list[Tensor] = []


def lend(model: Any, x: Tensor) -> Tensor:
    beside[:] = [model.layer(x)]
    return model.child(x)


def keep(model: Any, x: Tensor) -> Tensor:
    beside[:] = [model.layer(x)]
    return torch.tanh(beside[0])


def take(model: Any, x: Tensor) -> Tensor:
    return model.child(x).sum() + beside.pop().sum()


@pytest.mark.parametrize(
    ("model", "fqn", "reason"),
    [
        (
            nn.Sequential(Block(Running(draw)), nn.Linear(8, 1)),
            "0",
            "0.inner.rand draws from a generator of its own, whose state is not restored",
        ),
        (
            nn.Sequential(Running(average), nn.Linear(8, 8)),
            "0",
            "0.sub reads 0.steps, which 0.mul_ changes in place",
        ),
        (nn.Sequential(nn.Linear(8, 8), Running(add)), "1", "1.add_ changes its input in place"),
        (
            Running(lend, child=Running(lambda _, x: x * beside[-1])),
            "child",
            "it uses layer, which is computed before it and is none of its arguments",
        ),
        (
            Running(take, child=Running(keep)),
            "child",
            "what it makes is held elsewhere than in its result: child.layer",
        ),
    ],
    ids=["generator", "buffer", "in place", "reads", "keeps"],
)
def test_modules_that_cannot_be_recomputed(model: nn.Module, fqn: str, reason: str) -> None:
    _, choices, reasons = look_up(model)
    assert fqn not in choices
    assert reasons[fqn] == reason


def test_a_checkpoint_begins_with_a_buffer_as_it_was() -> None:
    assert "0" in look_up(nn.Sequential(Running(average_first), nn.Linear(8, 8)))[1]


def make_model() -> nn.Module:
    return nn.Sequential(Block(Mlp(64)), Block(Mlp(128)))


@pytest.fixture(scope="module")
def analysis() -> Any:
    return fxmem.analyze(make_model(), ("32x8",), device="cpu")


def test_the_front_is_that_of_all_choices(analysis: Any) -> None:
    step = build_index(analysis.graph, keeps_frames=True)
    limits = find_limits(step)
    choices, _ = list_modules(step, limits)
    costs = [float(operation.flops) + 1 for operation in analysis.graph.operations]
    scorer = Scorer(step, costs)
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
    for modules, front in ((choices, best), ((), [(analysis.peak_bytes, 0.0)])):
        problem = PlanProblem(step, limits, costs, modules=modules, whole_modules=True)
        run_strategy(problem, choose_modules)
        assert sorted((c.peak_bytes, c.cost) for c in problem.front) == front
        assert problem.front[0].segments == ()


def test_segments_are_calls_of_modules(analysis: Any) -> None:
    names = dict(make_model().named_modules())
    front = fxmem.pareto(analysis, style="modules")
    for plan in front:
        assert plan.style == "modules" and plan.fx_graph is None
        for segment in plan.segments:
            assert segment.fqn in names
            assert all(child.fqn.startswith(f"{segment.fqn}.") for child in segment.children)
    assert front[-1].segments


def test_styles_are_those_that_the_model_can_take(analysis: Any) -> None:
    assert fxmem.pareto(analysis)[0].style == "graph"
    recorded = fxmem.analyze(make_model(), ("32x8",), device="cpu", frontend="record")
    assert fxmem.pareto(recorded)[0].style == "modules"
    with pytest.raises(UsageError) as caught:
        fxmem.plan(recorded, max_overhead=0.1, style="graph")
    assert str(caught.value) == (
        "this model's graph cannot be rewritten: record was asked for (style='modules')"
    )
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


def test_modules_that_cannot_run_twice_are_reported() -> None:
    class Counting(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    step = fxmem.analyze(nn.Sequential(Mlp(), Counting()), ("32x8",), device="cpu")
    (limit,) = fxmem.pareto(step, style="modules")[0].limits
    assert (limit.node, limit.kind) == ("1", LimitKind.MODULE)
    assert limit.reason == "it changes what its module holds"
    assert limit.source is not None

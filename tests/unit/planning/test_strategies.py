"""Strategies: fxmem's by name, the user's own, and what becomes of bad proposals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import fxmem
from benchmarks.planner_cases import CASES
from fxmem.planning.strategies.builtin import STRATEGIES
from fxmem.planning.strategies.problem import PlanProblem


@pytest.fixture(scope="module")
def analysis() -> fxmem.Analysis:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(4))
    return fxmem.analyze(nn.Sequential(*blocks), ("4096x64",), device="cpu")


def every_nth_block(problem: PlanProblem) -> Iterator[list[tuple[int, int]]]:
    blocks = [(c.start, c.stop) for c in problem.calls if re.fullmatch(r"\d+", c.fqn)]
    for n in (1, 2, 3):
        yield blocks[::n]


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_a_strategy_of_ones_own(analysis: fxmem.Analysis, style: str) -> None:
    front = fxmem.pareto(analysis, strategy=every_nth_block, style=style)
    assert {tuple(s.fqn for s in plan.segments) for plan in front} <= {
        (),
        ("0", "1", "2", "3"),
        ("0", "2"),
        ("0", "3"),
    }
    leanest = fxmem.plan(analysis, max_overhead=1.0, strategy=every_nth_block, style=style)
    assert leanest.segments and leanest.peak_bytes < analysis.peak_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_have_names(analysis: fxmem.Analysis, name: str) -> None:
    front = fxmem.pareto(analysis, strategy=name)
    assert front[0].segments == () and front[-1].peak_bytes < analysis.peak_bytes


def test_a_strategy_sees_what_its_proposals_scored(analysis: fxmem.Analysis) -> None:
    seen: list[Any] = []

    def propose(problem: PlanProblem) -> Iterator[list[tuple[int, int]]]:
        seen.append(problem.front)
        yield [(1, 4)]
        seen.append(problem.score([(1, 4)]))

    fxmem.pareto(analysis, strategy=propose)
    (plain,), scored = seen
    assert plain.cost == 0 < scored.cost and plain.segments == ()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(1, 99)], "nodes 1 to 99 of"),
        ([(1, 3), (4, 2)], "nodes 4 to 2 of"),
        ([(1, 5), (3, 7)], "segments lie apart or within each other"),
        ([3], "a list of pairs: a first node and the node after the last"),
    ],
    ids=["beyond", "reversed", "crossing", "no pairs"],
)
def test_bad_proposals_are_refused(analysis: fxmem.Analysis, segments: Any, message: str) -> None:
    with pytest.raises(fxmem.UsageError, match=re.escape(message)):
        fxmem.pareto(analysis, strategy=lambda problem: iter([segments]))


@pytest.mark.parametrize("strategy", ["none", 3, lambda problem: None])
def test_a_strategy_is_a_name_or_a_function(analysis: fxmem.Analysis, strategy: Any) -> None:
    with pytest.raises(fxmem.UsageError, match="strategy"):
        fxmem.pareto(analysis, strategy=strategy)


def test_strategies_of_a_graph_propose_no_whole_modules(analysis: fxmem.Analysis) -> None:
    with pytest.raises(fxmem.UsageError, match="whole modules are all calls of a module"):
        fxmem.pareto(analysis, style="modules", strategy="schedules")


# rotor's schedules, run as nested checkpoints: peaks by the allocator's events, FLOPs as PyTorch
# counts them, with `python -m benchmarks.planner --only resnet`.
@pytest.mark.parametrize(
    ("mib", "overhead_flops"),
    [pytest.param(16.61, 0.3468, marks=pytest.mark.slow), (14.49, 0.5690)],
)
def test_what_schedules_of_blocks_take_is_enough(mib: float, overhead_flops: float) -> None:
    case = next(case.case for case in CASES if case.case.name == "resnet")
    analysis = fxmem.analyze(case.model(), *case.inputs(), device="cpu")
    assert fxmem.plan(analysis, budget=f"{mib}MiB").overhead_flops < overhead_flops

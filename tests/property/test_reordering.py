"""Every order that is held to be legal gives the same results, and takes what is said.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence

import pytest
from generated_modules import Program, programs, runs
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from steps import are_equal, take_step

import fxmem
from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.planning.applied import gather_changed, measure_plan
from fxmem.planning.facts import gather_facts
from fxmem.planning.fx_nodes import iterate_precedences
from fxmem.planning.inplace import find_inplace
from fxmem.planning.plan import Plan, Reorder
from fxmem.planning.reordering import build_program, move_names
from fxmem.planning.tasks import Program as Tasks
from fxmem.transform.checkpointing import build_module

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))
STRICT = settings(
    max_examples=EXAMPLES or 25,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the generated programs do is theirs: PyTorch warns of some of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw_order(program: Tasks, seed: int) -> list[int]:
    """Any order in which tasks come after those that they have to."""
    generator = random.Random(seed)
    order: list[int] = []
    waiting = set(range(len(program.tasks)))
    while waiting:
        ready = [index for index in sorted(waiting) if program.tasks[index].after <= {*order}]
        order.append(generator.choice(ready))
        waiting.remove(order[-1])
    return order


def list_reorders(names: Sequence[str], order: Sequence[int]) -> tuple[Reorder, ...]:
    """The moves, of one node each, that make an order."""
    now, moves = [*names], []
    for place, index in enumerate(order):
        if now[place] != names[index]:
            moves.append(Reorder(names[index], names[index], 1, now[place]))
            now = move_names(now, moves[-1:])
    assert now == [names[index] for index in order]
    return tuple(moves)


def check_order(program: Program, seed: int) -> None:
    case = program.case()
    args = case.inputs()[0]
    analysis: Analysis = analyze(case.model(), args, device="cpu", mode="infer")
    # What is kept on the module is no part of the graph; fakes of inputs keep a changed shape.
    if analysis.setup.frontend_reason or any(
        word in program.source for word in ("kept", "unsqueeze_(", ".t_(")
    ):
        return
    graph = analysis.fx_graph
    plain = take_step(case.model(), args, train=False)
    for inplace in ((), find_inplace(gather_facts(analysis.graph))):
        facts = gather_changed(analysis, inplace)
        order = draw_order(build_program(facts, iterate_precedences(graph)), seed)
        names = [node.name for node in facts.graph.nodes[: facts.nodes]]
        reorders = list_reorders(names, order)
        applied = build_module(case.model(), graph, (), inplace, reorders, mode="infer")
        assert are_equal(plain, take_step(applied, args, train=False)), order
        recorded = analyze(applied, args, device="cpu", mode="infer").peak_bytes
        plan = Plan("", 0, 0, inplace=inplace, reorders=reorders, mode="infer")
        promised, _ = measure_plan(analysis, plan)
        assert recorded <= promised <= recorded * 1.0001 + 64


@STRICT
@given(programs(), st.integers(0, 1000))
def test_any_legal_order_gives_the_same_results(program: Program, seed: int) -> None:
    assume(runs(program))
    check_order(program, seed)


@STRICT
@given(programs())
def test_a_plan_with_moves_takes_what_it_says(program: Program) -> None:
    assume(runs(program))
    case = program.case()
    args = case.inputs()[0]
    analysis: Analysis = analyze(case.model(), args, device="cpu", mode="infer")
    if analysis.frontend != "fx":
        return
    plan = fxmem.plan(analysis)
    without, _ = measure_plan(analysis, Plan("", 0, 0, inplace=plan.inplace, mode="infer"))
    assert not plan.reorders or plan.peak_bytes < without
    assert plan.peak_bytes == measure_plan(analysis, plan)[0]
    assert sum(move.saving_bytes for move in plan.reorders) == without - plan.peak_bytes

"""Every order that is held to be legal gives the same results, and takes what is said.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from generated_modules import Program, programs, runs
from generated_steps import analyse, is_in_graph, is_promise_kept
from hypothesis import assume, given
from hypothesis import strategies as st
from steps import are_equal, take_step
from trials import try_examples

import fxmem
from fxmem.applying.checkpointing import build_module
from fxmem.planning.applied import gather_changed, measure_plan
from fxmem.planning.facts import gather_facts
from fxmem.planning.fx_nodes import iterate_precedences
from fxmem.planning.inplace import find_inplace
from fxmem.planning.plan import Plan, Reorder
from fxmem.planning.reordering import build_program, move_names
from fxmem.planning.tasks import Program as Tasks

pytestmark = pytest.mark.filterwarnings("ignore")  # what programs do is theirs
STRICT = try_examples(25, are_slow=True)


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
    analysis = analyse(program, "infer")
    if analysis.setup.frontend_reason or not is_in_graph(program):
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
        recorded = fxmem.analyze(applied, args, device="cpu", mode="infer").peak_bytes
        plan = Plan("", 0, 0, inplace=inplace, reorders=reorders, mode="infer")
        promised, _ = measure_plan(analysis, plan)
        assert is_promise_kept(promised, recorded)


@STRICT
@given(programs(), st.integers(0, 1000))
def test_any_legal_order_gives_the_same_results(program: Program, seed: int) -> None:
    assume(runs(program))
    check_order(program, seed)


@STRICT
@given(programs())
def test_a_plan_with_moves_takes_what_it_says(program: Program) -> None:
    assume(runs(program))
    analysis = analyse(program, "infer")
    if analysis.frontend != "fx":
        return
    plan = fxmem.plan(analysis)
    without, _ = measure_plan(analysis, Plan("", 0, 0, inplace=plan.inplace, mode="infer"))
    assert not plan.reorders or plan.peak_bytes < without
    assert plan.peak_bytes == measure_plan(analysis, plan)[0]
    assert sum(move.saving_bytes for move in plan.reorders) == without - plan.peak_bytes

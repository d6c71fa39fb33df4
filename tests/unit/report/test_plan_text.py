from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hand_made import make_analysis, make_graph
from hand_made_plans import MIB, make_front, make_plan

from fxmem.graph import Phase
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import Limit, LimitKind, Plan, Segment
from fxmem.report.cells import measure_width
from fxmem.report.describing import describe_subject
from fxmem.report.plan_text import render_front, render_plan

SUBJECT = describe_subject(make_analysis())


def move_peak(phase: Phase, node: int | None) -> Peak:
    graph = make_graph()
    return dataclasses.replace(
        make_analysis().peak,
        operation=dataclasses.replace(graph.operations[5], phase=phase),
        node=None if node is None else graph.nodes[node],
    )


def test_the_report_of_a_plan(check_golden: Callable[[str, str], None]) -> None:
    check_golden("plan.txt", render_plan(make_plan(), SUBJECT, peak=make_analysis().peak))


def test_the_report_fits_80_columns(check_golden: Callable[[str, str], None]) -> None:
    text = render_plan(make_plan(), SUBJECT, peak=make_analysis().peak, width=80)
    check_golden("plan_80.txt", text)
    tables = text.split("\n\n")[2:]
    assert max(measure_width(line) for table in tables for line in table.splitlines()) <= 80


def test_the_table_of_trade_offs(check_golden: Callable[[str, str], None]) -> None:
    check_golden("plan_front.txt", render_front(make_front(5), SUBJECT, width=80))


def test_what_a_plan_lacks_is_left_out() -> None:
    nothing = {"inplace": (), "dels": (), "limits": ()}
    plan = make_plan(**nothing, lower_bound_overhead=None, reserved_bytes=0)
    text = render_plan(plan, SUBJECT)
    assert [
        w
        for w in ("in place", "let go", "then lies", "reserves", "No plan", "never", "begins")
        if w in text
    ] == []


def test_changes_are_counted_where_the_plan_s_graph_runs_them() -> None:
    note, counted = "no part of the new peak", "it is what your own code would save by that row"
    written = render_plan(make_plan(style="modules"), SUBJECT)
    assert note in written and counted not in written
    for plan in (make_plan(), make_plan(segments=(), mode="infer")):
        written = render_plan(plan, SUBJECT)
        assert counted in written and note not in written


def test_a_plan_that_changes_nothing_says_so() -> None:
    text = render_plan(Plan("0", 30 * MIB, 30 * MIB), SUBJECT)
    first, _ = text.splitlines()
    assert first == "Peak 30.00 MiB -> 30.00 MiB (100.0 %), nothing is computed again"


@pytest.mark.parametrize(
    ("phase", "node", "line"),
    [
        (Phase.BACKWARD, 2, "The peak then lies in backward of block.relu, net.py:12."),
        (Phase.FORWARD, None, "The peak then lies in forward."),
        (Phase.OPTIMIZER, None, "The peak then lies in the optimizer's step."),
    ],
)
def test_the_place_of_the_new_peak(phase: Phase, node: int | None, line: str) -> None:
    plan = make_plan(reserved_bytes=21 * MIB)
    assert line in render_plan(plan, SUBJECT, peak=move_peak(phase, node)).splitlines()


def test_of_many_reasons_the_first_are_told_and_the_rest_counted() -> None:
    limits = [Limit(f"n{i}", LimitKind.RECOMPUTE, f"reason {i}") for i in range(7)]
    limits += [Limit("n7", LimitKind.RECOMPUTE, "reason 6"), Limit("b", LimitKind.BEGIN, "why")] * 2
    told = [
        "9 nodes are never computed again:",
        *(f"- n{i}: reason {i}" for i in range(5)),
        "- 4 more for other reasons",
        "No segment begins at 2 nodes: what it would take is changed in place later.",
    ]
    plan = make_plan(limits=tuple(limits))
    for text in (render_plan(plan, SUBJECT), render_front([plan], SUBJECT)):
        assert "\n\n{}\n\n".format("\n".join(told)) in text


def test_one_node_that_is_never_computed_again() -> None:
    plan = make_plan(limits=(Limit("a\x1b", LimitKind.RECOMPUTE, "is new"),))
    lines = ["1 node is never computed again:", r"- a\x1b: is new"]
    assert "\n".join(lines) in render_plan(plan, SUBJECT)


def test_names_are_made_printable() -> None:
    segment = Segment("a\x1b[2J", "b\n", 2)
    plan = make_plan(segments=(segment,))
    assert r"a\x1b[2J .. b\n" in render_plan(plan, SUBJECT)


def test_savings_that_are_not_told_are_left_out() -> None:
    text = render_plan(make_front()[2], SUBJECT)
    assert "computed again" in text
    assert "off the peak" not in text.lower()


def test_where_no_plan_takes_less_the_table_says_so() -> None:
    text = render_front(make_front(1), SUBJECT)
    assert text.startswith("Peak 30.00 MiB; 1 plan, down to 30.00 MiB\n")
    assert text.endswith("\n\nNo plan was found that takes less.\n")

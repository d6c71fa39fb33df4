from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hand_made import make_analysis, make_graph
from hand_made_plans import MIB, make_front, make_plan
from hypothesis import given
from hypothesis import strategies as st

from fxmem.finding import Finding
from fxmem.graph import Phase, SourceLocation
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import Front, Limit, LimitKind, Plan
from fxmem.planning.plan_blocks import LimitBytes, list_advice_blocks
from fxmem.report.blocks import render_text
from fxmem.report.tables import measure_width
from fxmem.report.text import write_subject
from fxmem.units import parse_bytes

SETUP = make_analysis().setup


def render_plan(plan: Plan, peak: Peak | None = None, width: int | None = None) -> str:
    """The report on a plan of a step whose peak with the plan is given."""
    step: Any = SimpleNamespace(setup=SETUP, nodes=(), peak=peak)
    with mock.patch("fxmem.planning.plan.Plan.find_step", lambda *_: peak and step):
        return dataclasses.replace(plan, analysis=step).to_text(width=width)


def render_front(plans: Sequence[Plan], width: int | None = None) -> str:
    step: Any = SimpleNamespace(setup=SETUP)
    return Front(dataclasses.replace(plan, analysis=step) for plan in plans).to_text(width=width)


def move_peak(phase: Phase, node: int | None) -> Peak:
    graph = make_graph()
    return dataclasses.replace(
        make_analysis().peak,
        operation=dataclasses.replace(graph.operations[5], phase=phase),
        node=None if node is None else graph.nodes[node],
    )


def test_the_report_fits_80_columns(check_golden: Callable[[str, str], None]) -> None:
    text = render_plan(make_plan(), make_analysis().peak, width=80)
    check_golden("plan_80.txt", text)
    tables = text.split("\n\n")[2:]
    assert max(measure_width(line) for table in tables for line in table.splitlines()) <= 80


def test_the_table_of_trade_offs(check_golden: Callable[[str, str], None]) -> None:
    check_golden("plan_front.txt", render_front(make_front(5), width=80))


def test_empty_parts_of_a_plan_is_left_out() -> None:
    nothing = {"inplace": (), "dels": (), "limits": ()}
    plan = make_plan(**nothing, lower_bound_overhead=None, reserved_bytes=0)
    text = render_plan(plan)
    assert [
        w
        for w in ("in place", "freed", "new peak", "reserves", "Any plan", "never", "starts")
        if w in text
    ] == []


def test_changes_are_counted_where_the_graph_of_the_plan_runs_them() -> None:
    note, counted = "the new peak does not include them", "the saving in your own code"
    written = render_plan(make_plan(style="modules"))
    assert note in written and counted not in written
    for plan, has_note in ((make_plan(), True), (make_plan(segments=(), mode="infer"), False)):
        written = render_plan(plan)
        assert counted in written and note not in written
        assert ("the new peak does not include the in-place ones" in written) is has_note


def test_a_plan_that_changes_nothing_says_so() -> None:
    text = render_plan(Plan("0", 30 * MIB, 30 * MIB))
    first, _ = text.splitlines()
    assert first == "Peak 30.00 MiB -> 30.00 MiB (100.0 %), nothing is recomputed"


@pytest.mark.parametrize(
    ("phase", "node", "line"),
    [
        (Phase.BACKWARD, 2, "The new peak is in backward of block.relu, net.py:12."),
        (Phase.FORWARD, None, "The new peak is in forward."),
        (Phase.OPTIMIZER, None, "The new peak is in the optimizer step."),
    ],
)
def test_the_place_of_the_new_peak(phase: Phase, node: int | None, line: str) -> None:
    plan = make_plan(reserved_bytes=21 * MIB)
    assert line in render_plan(plan, move_peak(phase, node)).splitlines()


def test_of_many_reasons_the_first_are_told_and_the_rest_counted() -> None:
    limits = [Limit(f"n{i}", LimitKind.RECOMPUTE, f"reason {i}") for i in range(7)]
    limits += [Limit("n7", LimitKind.RECOMPUTE, "reason 6"), Limit("b", LimitKind.BEGIN, "why")] * 2
    told = [
        "9 nodes are never recomputed:",
        *(f"- n{i}: reason {i}" for i in range(5)),
        "- 4 more for other reasons",
        "No segment starts at 2 nodes whose inputs are modified in place later.",
    ]
    plan = make_plan(limits=tuple(limits))
    for text in (render_plan(plan), render_front([plan])):
        assert "\n\n{}\n\n".format("\n".join(told)) in text


def test_a_front_of_one_plan_says_so() -> None:
    text = render_front(make_front(1))
    assert text.startswith("Peak 30.00 MiB; 1 plan, down to 30.00 MiB\n")
    assert text.endswith("\n\nNo plan with a lower peak was found.\n")


@given(st.integers(0, 1 << 45))
def test_a_peak_in_the_table_is_a_budget_that_its_plan_keeps(nbytes: int) -> None:
    text = str(LimitBytes(nbytes))
    assert nbytes <= parse_bytes(text) <= nbytes * 1.011 + 1


ADVICE = (
    Finding("FX301", "Autocast", 'autocast="bf16"', 12 * MIB, 18 * MIB, "Numerics change."),
    Finding(
        "FX202",
        "Free \x1b[2J gradients",
        "zero_grad(set_to_none=True)",
        28 * MIB,
        2 * MIB,
        "None.",
        SourceLocation("/home/me/train.py", 12),
    ),
)
ADVICE_TEXT = """\
Other ways to lower the peak of 30.00 MiB, each by itself and without a plan:

FX301 18.00 MiB off the peak, 12.00 MiB left: Autocast.
  Write: autocast="bf16"
  Cost: Numerics change.

FX202 2.00 MiB off the peak, 28.00 MiB left: Free \\x1b[2J gradients (train.py:12).
  Write: zero_grad(set_to_none=True)
  Cost: None.

fxmem explain FX301 shows the code before and after.
"""


def test_advice_after_a_plan_and_by_itself() -> None:
    assert render_text(list_advice_blocks(ADVICE, 30 * MIB)) == ADVICE_TEXT
    text = render_text(list_advice_blocks(ADVICE, 30 * MIB, SETUP))
    assert text == f"Peak 30.00 MiB\n{write_subject(SETUP)}\n\n{ADVICE_TEXT}"
    expected = "No other change that was tried lowers the peak by 0.5 % or 1 MiB.\n"
    assert render_text(list_advice_blocks((), 30 * MIB)) == expected

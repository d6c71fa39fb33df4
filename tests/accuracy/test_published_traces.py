"""Published traces of the allocator: every allocation and free of a step, as predicted."""

from __future__ import annotations

import pytest

from benchmarks.cuda_trace import Change
from benchmarks.published.cases import Case, load_all
from benchmarks.published.traces import FOLDER, _leave_out, compare, compare_case, load_trace

CASES = [case for case in load_all() if "trace" in case.config]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c.slow else ()) for c in CASES], ids=str
)
def test_the_events_of_a_step_are_those_of_its_trace(case: Case) -> None:
    comparison = compare_case(case)
    assert len(comparison.differences) == case.config["trace_differences"]
    if not comparison.differences:
        assert comparison.common == comparison.measured == comparison.predicted


def test_every_trace_is_a_case_s() -> None:
    names = {path.name.removesuffix(".json.gz") for path in FOLDER.iterdir()}
    assert names == {case.config["trace"] for case in CASES}


def test_a_trace_begins_with_the_first_lookup() -> None:
    (case,) = (case for case in CASES if case.id == "small 512 infer")
    assert load_trace(case)[:2] == [
        Change(4 * 512 * 768 * 4, "index_Tensor"),
        Change(4 * 512 * 768 * 4, "pow_Tensor_Scalar"),
    ]


def test_operators_are_left_out_with_their_frees() -> None:
    events = [[8, "a", "a"], [4, "ne", "isnan"], [1, "any", "isnan"], [-1], [-4], [-8]]
    assert list(_leave_out(events, {"isnan"})) == [[8, "a", "a"], [-8]]


def test_frees_between_allocations_have_no_order() -> None:
    measured = [Change(4), Change(8), Change(-4), Change(-8), Change(2)]
    predicted = [Change(4), Change(8), Change(-8), Change(-4), Change(3)]
    comparison = compare(measured, predicted)
    assert comparison.common == 4
    assert [(d.measured, d.predicted) for d in comparison.differences] == [(Change(2), Change(3))]

"""Saving and recomputing by segments: small steps by hand, and a step that runs out of time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fxmem.planning.strategies.segmented import (
    Segment,
    SegmentedSolution,
    SegmentedStep,
    Value,
    find_recomputed,
    measure_peak,
    solve_segmented,
)

# Convolution, normalisation, activation: (bytes, cost); then what the next segment makes of it.
VALUES = (
    Value(0, 40, 9.0, (), (0,)),
    Value(0, 40, 2.0, (0,), (0,)),
    Value(0, 10, 1.0, (1,), (0, 1)),
    Value(1, 20, 4.0, (2,), (1,)),
)
STEP = SegmentedStep((Segment(3, 15), Segment(3, 25)), VALUES)


def solve(step: SegmentedStep, budget: int) -> SegmentedSolution:
    found = solve_segmented(step, budget)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("budget", "saved", "recomputed", "cost", "peak"),
    [
        # Backward of the second segment: 90 + 20 + 25.
        (135, (0, 1, 2, 3), (), 0.0, 135),
        # Less the normalisation's output, cheap to make again: 50 + 20 + 25; the first: 90 + 15.
        (134, (0, 2, 3), (1,), 2.0, 105),
    ],
)
def test_what_is_cheapest_to_compute_again_is_not_saved(
    budget: int, saved: tuple[int, ...], recomputed: tuple[int, ...], cost: float, peak: int
) -> None:
    assert solve(STEP, budget) == SegmentedSolution(saved, recomputed, peak, cost, cost)


def test_what_the_backward_of_a_segment_needs_itself_is_there_however_it_came() -> None:
    assert solve(STEP, 105).cost == 2.0
    assert solve_segmented(STEP, 104) is None


def test_what_a_later_segment_needs_is_saved() -> None:
    assert find_recomputed(STEP, (0, 1, 3)) is None
    assert 2 in solve(STEP, 105).saved


def test_what_comes_from_an_earlier_segment_is_saved_for_computing_again() -> None:
    values = (Value(0, 10, 1.0), Value(1, 50, 3.0, (0,), (1,)), Value(2, 30, 8.0, (), (2,)))
    step = SegmentedStep((Segment(0, 0), Segment(0, 0), Segment(0, 30)), values)
    # Saving all takes 50 + 30 + 30 at the last segment; the small value is saved for its use.
    assert solve(step, 110).saved == (1, 2)
    found = solve(step, 109)
    assert (found.saved, found.recomputed, found.peak_bytes) == ((0, 2), (1,), 70)


def test_what_changes_something_is_not_computed_again() -> None:
    impure = SegmentedStep(
        STEP.segments, (VALUES[0], replace(VALUES[1], can_recompute=False), *VALUES[2:])
    )
    # Of the first two, the expensive one now; what it takes to make it is there.
    assert find_recomputed(impure, (0, 2, 3)) is None
    assert solve(impure, 134).recomputed == (0,)


def test_forward_counts_what_is_saved_so_far() -> None:
    step = SegmentedStep((Segment(60, 0), Segment(3, 0)), (Value(0, 40, 1.0, (), (0,)), VALUES[3]))
    step = replace(step, values=(step.values[0], Value(1, 20, 4.0, (), (1,))))
    assert measure_peak(step, (0, 1)) == 100
    found = solve(step, 99)
    assert (found.recomputed, found.peak_bytes) == ((0,), 60)


def make_large_step(seed: int) -> SegmentedStep:
    """Segments of many values, up to gibibytes each and of odd sizes."""
    draw = Random(seed)
    values = tuple(
        Value(k // 8, draw.randrange(2**32), draw.random(), (k - 1,) if k else (), (k // 8,))
        for k in range(80)
    )
    return SegmentedStep((Segment(2**30, 2**31),) * 10, values)


@pytest.mark.parametrize("seed", range(4))
def test_large_sizes_fit_to_the_byte(seed: int) -> None:
    step = make_large_step(seed)
    first = solve(step, measure_peak(step, range(80)) // 2)
    # As much as that takes: the same again, to the byte of about 100 GiB.
    again = solve(step, first.peak_bytes)
    assert again.cost <= first.cost * 1.001
    assert again.peak_bytes <= first.peak_bytes
    assert solve(step, first.peak_bytes - 1).peak_bytes < first.peak_bytes


def test_a_gap_is_left_where_it_is_allowed() -> None:
    step = make_large_step(0)
    budget = measure_peak(step, range(80)) // 3
    rough, fine = solve_segmented(step, budget, gap=0.5), solve_segmented(step, budget, gap=0.0)
    assert rough is not None
    assert fine is not None
    assert rough.lower_bound_cost < 0.999 * rough.cost
    assert fine.lower_bound_cost == pytest.approx(fine.cost, rel=1e-6)
    assert rough.lower_bound_cost <= fine.cost <= rough.cost


def test_costs_in_nanoseconds_count() -> None:
    values = tuple(replace(value, cost=value.cost * 1e-9) for value in VALUES)
    found = solve(replace(STEP, values=values), 134)
    assert found.recomputed == (1,)
    assert found.lower_bound_cost == pytest.approx(2e-9, rel=1e-3)


def test_nothing_is_found_in_no_time_and_nothing_printed(capfd: pytest.CaptureFixture[str]) -> None:
    step = make_large_step(0)
    budget = measure_peak(step, range(80)) // 3
    assert solve_segmented(step, budget) is not None
    assert solve_segmented(step, budget, time_limit_s=0.0) is None
    assert capfd.readouterr() == ("", "")


def test_a_step_that_makes_nothing_costs_nothing() -> None:
    empty = SegmentedStep((Segment(4, 5),), ())
    assert solve_segmented(empty, 5) == SegmentedSolution((), (), 5, 0.0, 0.0)
    assert solve_segmented(empty, 4) is None

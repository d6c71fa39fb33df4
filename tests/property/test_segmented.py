"""The integer program against every choice of what to save, run segment by segment.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st
from trials import try_examples

from fxmem.planning.strategies.segmented import (
    Segment,
    SegmentedStep,
    Value,
    measure_peak,
    solve_segmented,
)

RUNS = try_examples(100)


@st.composite
def steps(draw: st.DrawFn, most_values: int = 7) -> SegmentedStep:
    """Steps of up to three segments, with whole costs."""
    count = draw(st.integers(1, 3))
    sizes = st.integers(0, 9)
    segments = tuple(Segment(draw(sizes), draw(sizes)) for _ in range(count))
    homes = sorted(draw(st.lists(st.integers(0, count - 1), max_size=most_values)))
    values = []
    for index, home in enumerate(homes):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        needed = draw(st.sets(st.integers(home, count - 1), max_size=2))
        values.append(
            Value(
                home,
                draw(sizes),
                float(draw(st.integers(0, 5))),
                tuple(sorted(parents)),
                tuple(sorted(needed)),
                draw(st.integers(0, 5)) > 0,
            )
        )
    return SegmentedStep(segments, tuple(values))


def run_step(step: SegmentedStep, saved: set[int]) -> tuple[int, float] | None:
    """The peak and the cost of a step; None where something is missing in backward."""
    live: set[int] = set()
    moments = []

    def observe(beside: int) -> None:
        moments.append(beside + sum(step.values[index].nbytes for index in live))

    for k, segment in enumerate(step.segments):
        live |= {i for i in saved if step.values[i].segment == k}
        observe(segment.forward_peak_bytes)
    cost = 0.0
    for k, segment in reversed(list(enumerate(step.segments))):
        own = [i for i, value in enumerate(step.values) if value.segment == k]
        wanted = {i for i, value in enumerate(step.values) if k in value.needed_by}
        if any(step.values[i].segment != k for i in wanted - live):
            return None
        computed: set[int] = set()
        pending = list(wanted - live)
        while pending:
            index = pending.pop()
            if index in live or index in computed:
                continue
            if index not in own or not step.values[index].can_recompute:
                return None
            computed.add(index)
            pending += step.values[index].parents
        cost += sum(step.values[i].cost for i in computed)
        live |= {i for i in wanted if i in own}
        observe(segment.backward_peak_bytes)
        live -= set(own)
    assert not live
    return max(moments), cost


def list_runs(step: SegmentedStep) -> list[tuple[int, float]]:
    """The peak and the cost of every choice that works."""
    count = len(step.values)
    choices = chain.from_iterable(combinations(range(count), n) for n in range(count + 1))
    runs = (run_step(step, set(choice)) for choice in choices)
    return [run for run in runs if run is not None]


@RUNS
@given(steps())
def test_nothing_that_fits_is_cheaper_than_what_is_found(step: SegmentedStep) -> None:
    runs = list_runs(step)
    for budget in sorted({peak + less for peak, _ in runs for less in (0, -1)}):
        fitting = [cost for peak, cost in runs if peak <= budget]
        found = solve_segmented(step, budget, gap=0.0)
        assert (found is None) == (not fitting)
        if found:
            assert found.cost == min(fitting)
            assert min(fitting) - 1e-6 <= found.lower_bound_cost <= found.cost
            assert found.peak_bytes <= budget
            assert run_step(step, set(found.saved)) == (found.peak_bytes, found.cost)
            assert measure_peak(step, found.saved) == found.peak_bytes

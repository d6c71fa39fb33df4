"""The chain solver against all nested schedules, run tensor by tensor.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

from itertools import pairwise

from chain_machine import list_schedules, replay_schedule
from hypothesis import given
from hypothesis import strategies as st
from trials import try_examples

from fxmem.planning.strategies.chains.chain import (
    Chain,
    Stage,
    StageOption,
    keep_stages,
    measure_schedule,
)
from fxmem.planning.strategies.chains.solver import find_least_memory, solve_chain

RUNS = try_examples(80)


@st.composite
def chains(draw: st.DrawFn, most_stages: int, most_options: int = 2, most_bytes: int = 6) -> Chain:
    """Chains whose costs are whole numbers, so that sums of them are exact."""
    sizes = st.integers(0, most_bytes)
    halves = st.integers(0, most_bytes // 2)
    stages = []
    for _ in range(draw(st.integers(1, most_stages))):
        cost = float(draw(st.integers(0, 9)))
        options = []
        for _ in range(draw(st.integers(1, most_options))):
            saved = draw(sizes)
            options.append(
                StageOption(
                    saved_bytes=saved,
                    cost=float(draw(st.integers(0, 5))),
                    forward_peak_bytes=draw(halves),
                    backward_peak_bytes=draw(st.integers(-saved, most_bytes)),
                    tail_cost=float(draw(st.integers(0, int(cost)))),
                )
            )
        stages.append(
            Stage(draw(sizes), draw(halves), cost, tuple(options), draw(halves), draw(halves))
        )
    return Chain(tuple(stages), output_bytes=draw(halves), gradient_bytes=draw(halves))


@RUNS
@given(chains(most_stages=4))
def test_with_a_slot_of_one_byte_nothing_is_cheaper_than_what_is_found(chain: Chain) -> None:
    runs = [replay_schedule(chain, schedule) for schedule in list_schedules(chain)]
    budgets = range(max(peak for peak, _ in runs) + 2)
    for budget, found in zip(budgets, solve_chain(chain, budgets), strict=True):
        fitting = [cost for peak, cost in runs if peak <= budget]
        assert (found is None) == (not fitting)
        if found:
            assert found.cost == found.lower_bound_cost == min(fitting)
            assert replay_schedule(chain, found.schedule) == (found.peak_bytes, found.cost)
            assert found.peak_bytes <= budget
    assert find_least_memory(chain) == min(peak for peak, _ in runs)


@RUNS
@given(chains(most_stages=4, most_bytes=50), st.integers(1, 12))
def test_whatever_the_slots_the_optimum_lies_between_bound_and_cost(
    chain: Chain, slots: int
) -> None:
    runs = [replay_schedule(chain, schedule) for schedule in list_schedules(chain)]
    budgets = sorted({peak for peak, _ in runs})[:40]
    for budget, found in zip(budgets, solve_chain(chain, budgets, slots), strict=True):
        optimum = min(cost for peak, cost in runs if peak <= budget)
        assert found is not None
        assert found.lower_bound_cost <= optimum <= found.cost
        assert replay_schedule(chain, found.schedule) == (found.peak_bytes, found.cost)
        assert found.peak_bytes <= budget


@RUNS
@given(chains(most_stages=12, most_options=4, most_bytes=2**40), st.integers(1, 60))
def test_more_memory_never_costs_more(chain: Chain, slots: int) -> None:
    least = find_least_memory(chain)
    kept = keep_stages(chain)
    assert least is not None
    assert kept is not None
    most = measure_schedule(chain, kept).peak_bytes
    budgets = [least + (most - least) * step // 10 for step in range(11)]
    solutions = [found for found in solve_chain(chain, budgets, slots) if found]
    assert len(solutions) == len(budgets)
    for budget, found in zip(budgets, solutions, strict=True):
        assert replay_schedule(chain, found.schedule) == (found.peak_bytes, found.cost)
        assert found.peak_bytes <= budget
        assert found.lower_bound_cost <= found.cost
    for smaller, larger in pairwise(solutions):
        assert larger.cost <= smaller.cost
    assert solve_chain(chain, [least - 1], slots) == (None,)


@RUNS
@given(chains(most_stages=3))
def test_a_measure_is_what_the_machine_sees(chain: Chain) -> None:
    for schedule in list_schedules(chain):
        measure = measure_schedule(chain, schedule)
        assert (measure.peak_bytes, measure.cost) == replay_schedule(chain, schedule)

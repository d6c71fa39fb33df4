"""The chain solver against all nested schedules, run tensor by tensor.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

from math import comb

import pytest
from chain_machine import list_schedules, replay_schedule
from hypothesis import given
from hypothesis import strategies as st
from trials import try_examples

from fxmem.planning.strategies.chain import (
    Chain,
    Stage,
    StageOption,
    find_least_memory,
    keep_stages,
    measure_kept,
    solve_chain,
)

RUNS = try_examples(40)


@st.composite
def chains(draw: st.DrawFn, most_stages: int, most_options: int = 2, most_bytes: int = 6) -> Chain:
    """Chains whose costs are whole numbers, so that sums of them are exact."""
    sizes = st.integers(0, most_bytes)
    halves = st.integers(0, most_bytes // 2)
    stages = []
    for _ in range(draw(st.integers(1, most_stages))):
        options = []
        for _ in range(draw(st.integers(1, most_options))):
            saved = draw(sizes)
            backward = draw(st.integers(-saved, most_bytes))
            options.append(
                StageOption(saved, float(draw(st.integers(0, 5))), draw(halves), backward)
            )
        cost = float(draw(st.integers(0, 9)))
        stages.append(
            Stage(draw(sizes), draw(halves), cost, tuple(options), draw(halves), draw(halves))
        )
    return Chain(tuple(stages), output_bytes=draw(halves), gradient_bytes=draw(halves))


@RUNS
@given(chains(most_stages=4))
def test_with_a_slot_of_one_byte_nothing_is_cheaper_than_what_is_found(chain: Chain) -> None:
    schedules = list_schedules(chain)
    runs = [replay_schedule(chain, schedule) for schedule in schedules]
    assert measure_kept(chain) == replay_schedule(chain, keep_stages(chain))[0]
    assert find_least_memory(chain) == min(peak for peak, _ in runs)
    budgets = range(find_least_memory(chain), max(peak for peak, _ in runs) + 2)
    for budget, found in zip(budgets, solve_chain(chain, budgets), strict=True):
        peak_bytes, cost = replay_schedule(chain, found)
        assert peak_bytes <= budget
        assert cost == min(cost for peak, cost in runs if peak <= budget)


@RUNS
@given(chains(most_stages=12, most_options=4, most_bytes=2**40), st.integers(1, 60))
def test_whatever_the_slots_a_schedule_fits_its_budget(chain: Chain, slots: int) -> None:
    least, most = find_least_memory(chain), measure_kept(chain)
    budgets = [least + (most - least) * step // 10 for step in range(11)]
    for budget, found in zip(budgets, solve_chain(chain, budgets, slots), strict=True):
        assert replay_schedule(chain, found)[0] <= budget


def count_advances(steps: int, checkpoints: int) -> int:
    """Steps run again to reverse a chain: Griewank & Walther 2000, "Algorithm 799: revolve"."""
    repeats = 0
    while comb(checkpoints + repeats, checkpoints) < steps:
        repeats += 1
    return repeats * steps - comb(checkpoints + repeats, repeats - 1) if repeats else 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 20])
@pytest.mark.parametrize("checkpoints", [1, 2, 3, 4, 6])
def test_a_uniform_chain_is_reversed_as_by_revolve(steps: int, checkpoints: int) -> None:
    # Room for one stage that keeps 100 bytes, never for two, and for the input of that stage,
    # which revolve does not count among its checkpoints.
    chain = Chain(tuple(Stage(1, 0, 1.0, (StageOption(100),)) for _ in range(steps)))
    (found,) = solve_chain(chain, [checkpoints + 1 + 100])
    assert replay_schedule(chain, found)[1] == count_advances(steps, checkpoints)

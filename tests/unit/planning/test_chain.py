"""Chains that can be worked out by hand, and the known optimum of uniform ones."""

from __future__ import annotations

from math import comb

import pytest
from chain_machine import replay_schedule

from fxmem.errors import UsageError
from fxmem.planning.strategies.chains.chain import (
    Chain,
    Kept,
    Recomputed,
    Stage,
    StageOption,
    keep_stages,
    measure_schedule,
)
from fxmem.planning.strategies.chains.solver import ChainSolution, find_least_memory, solve_chain


def make_chain(*stages: tuple[int, float], around: int = 1) -> Chain:
    """Stages of (saved bytes, cost) whose boundaries hold as much as each other."""
    return Chain(
        tuple(Stage(around, 0, cost, (StageOption(saved),)) for saved, cost in stages),
    )


def solve_one(chain: Chain, budget: int) -> ChainSolution:
    (found,) = solve_chain(chain, [budget])
    assert found is not None
    return found


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
    chain = make_chain(*[(100, 1.0)] * steps)
    found = solve_one(chain, checkpoints + 1 + 100)
    assert found.cost == found.lower_bound_cost == count_advances(steps, checkpoints)
    assert replay_schedule(chain, found.schedule) == (found.peak_bytes, found.cost)


def test_what_does_not_fit_is_run_again_where_that_is_cheapest() -> None:
    # Saved with the input 1: 10 + 20 + 30 + 1 = 61. One byte less and some stage has to go; the
    # last is at hand anyway, and of the first two the second frees more but costs more.
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    assert solve_one(chain, 61).schedule == (Kept(0), Kept(1), Kept(2))
    found = solve_one(chain, 60)
    assert found.schedule == (Recomputed(0, 1, (Kept(0),)), Kept(1), Kept(2))
    assert (found.peak_bytes, found.cost) == (1 + 1 + 20 + 30, 2.0)
    # 52 is what that takes; below it the second goes: 1 + 10 + 1 + 30.
    found = solve_one(chain, 51)
    assert found.schedule == (Kept(0), Recomputed(1, 2, (Kept(1),)), Kept(2))
    assert (found.peak_bytes, found.cost) == (42, 3.0)
    # A region for each takes 1 + 1 + 1 + 30, one for both a byte less: its body takes 1 + 10 + 20.
    found = solve_one(chain, 32)
    assert found.schedule == (Recomputed(0, 2, (Kept(0), Kept(1))), Kept(2))
    assert (found.peak_bytes, found.cost) == (32, 5.0)
    assert find_least_memory(chain) == 32


def test_a_body_nests_a_region_where_it_is_too_large_itself() -> None:
    # The last stage leaves room for one boundary only; the two before do not fit side by side.
    chain = make_chain((20, 1.0), (20, 10.0), (30, 5.0))
    found = solve_one(chain, 32)
    body = (Recomputed(0, 1, (Kept(0),)), Kept(1))
    assert found.schedule == (Recomputed(0, 2, body), Kept(2))
    # The first stage runs three times, the second twice.
    assert found.cost == 1.0 + 10.0 + 1.0
    assert found.peak_bytes == 32


def test_a_smaller_option_is_taken_where_it_costs_less_than_running_again() -> None:
    options = (StageOption(40), StageOption(25, cost=0.5))
    chain = Chain((Stage(1, 0, 2.0, options), Stage(1, 0, 2.0, (StageOption(40),))))
    assert solve_one(chain, 81).schedule == (Kept(0, 0), Kept(1, 0))
    found = solve_one(chain, 80)
    assert (found.schedule, found.cost, found.peak_bytes) == ((Kept(0, 1), Kept(1, 0)), 0.5, 66)
    found = solve_one(chain, 65)
    assert (found.schedule[1:], found.cost, found.peak_bytes) == ((Kept(1, 0),), 2.0, 42)


def test_the_tail_of_a_body_is_not_run_again() -> None:
    option = StageOption(10, tail_cost=0.75)
    chain = Chain(tuple(Stage(1, 0, 1.0, (option,)) for _ in range(3)))
    # Each body ends early, the last stage of the step's own forward does not.
    assert solve_one(chain, 30).cost == 0.25
    assert solve_one(chain, 21).cost == 0.5
    # Within a body only the last stage's tail is left out.
    schedule = (Recomputed(0, 2, (Kept(0), Kept(1))), Kept(2))
    assert measure_schedule(chain, schedule).cost == 1.25


def test_peaks_count_what_is_held_where_backward_stands() -> None:
    option = StageOption(10, forward_peak_bytes=3, backward_peak_bytes=5)
    stages = (Stage(1, 2, 1.0, (option,), 4, held_bytes=50), Stage(1, 2, 1.0, (option,), 4))
    chain = Chain(stages, output_bytes=0, gradient_bytes=7)
    # Backward of the first stage: 50 held, input 1, saved 10, gradients 2 and 2, transient 5.
    assert measure_schedule(chain, (Kept(0), Kept(1))).peak_bytes == 70
    assert find_least_memory(chain) == 70
    # Of the second: input 1, saved 20, gradients 2 and 7, transient 5; nothing held.
    light = Chain((Stage(1, 2, 1.0, (option,), 4), stages[1]), gradient_bytes=7)
    assert measure_schedule(light, (Kept(0), Kept(1))).peak_bytes == 35
    # In a region the first keeps its output 1 only.
    region = Recomputed(0, 1, (Kept(0),))
    assert measure_schedule(light, (region, Kept(1))).peak_bytes == 26


def test_forward_has_no_gradient_yet_and_what_is_run_again_has_the_one_of_its_output() -> None:
    last = Stage(0, 6, 1.0, (StageOption(10, forward_peak_bytes=200),))
    chain = Chain((Stage(0, 0, 1.0, (StageOption(10),)), last), gradient_bytes=100)
    # Forward of the last stage: saved 10, transient 200; in backward 10 and gradients 6 and 100.
    assert measure_schedule(chain, (Recomputed(0, 1, (Kept(0),)), Kept(1))).peak_bytes == 210
    # Run again it has the gradient 100 beside it, and what the first stage saved.
    assert measure_schedule(chain, (Recomputed(0, 2, (Kept(0), Kept(1))),)).peak_bytes == 320


def test_a_region_at_the_end_of_a_body_is_only_run_once_more() -> None:
    chain = make_chain((10, 1.0), (10, 2.0), (10, 4.0))
    body = (Kept(0), Recomputed(1, 2, (Kept(1),)))
    assert measure_schedule(chain, (Recomputed(0, 2, body), Kept(2))).cost == 3.0


def test_budgets_come_in_any_order_and_more_than_once() -> None:
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    costs = [found and found.cost for found in solve_chain(chain, [60, 31, 1000, 60, 41])]
    assert costs == [2.0, None, 0.0, 2.0, 5.0]
    assert solve_chain(chain, []) == ()


def test_few_slots_still_find_what_fits_and_own_up_to_the_gap() -> None:
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    (found,) = solve_chain(chain, [32], slots=1)
    assert found is not None
    assert (found.cost, found.peak_bytes) == (5.0, 32)
    assert found.lower_bound_cost < 5.0


def test_a_stage_without_options_cannot_be_run() -> None:
    chain = Chain((Stage(1, 1, 1.0, ()), Stage(1, 1, 1.0, (StageOption(1),))))
    assert solve_chain(chain, [1000]) == (None,)
    assert find_least_memory(chain) is None
    assert keep_stages(chain) is None


def test_a_chain_has_stages() -> None:
    with pytest.raises(UsageError) as caught:
        Chain(())
    assert str(caught.value) == "a chain has at least one stage"


@pytest.mark.parametrize(
    ("stages", "slots", "budget"),
    [
        # Sizes rounded up mislead in the first, rounded down in the second, both in the third.
        ([(40, 1.0), (30, 9.0), (45, 7.0), (30, 8.0), (35, 4.0), (20, 5.0)], 3, 71),
        ([(30, 1.0), (45, 6.0), (20, 3.0)], 8, 88),
        ([(25, 4.0), (40, 5.0), (45, 8.0), (35, 2.0), (35, 2.0)], 5, 132),
    ],
)
def test_few_slots_are_made_up_for_by_reading_them_in_three_ways(
    stages: list[tuple[int, float]], slots: int, budget: int
) -> None:
    chain = make_chain(*stages)
    (found,) = solve_chain(chain, [budget], slots)
    assert found is not None
    assert found.cost == solve_one(chain, budget).cost


def test_a_small_budget_has_slots_of_its_own() -> None:
    chain = make_chain((40, 1.0), (30, 9.0), (45, 7.0), (30, 8.0), (35, 4.0), (20, 5.0))
    assert solve_chain(chain, [200, 71], slots=3)[1:] == solve_chain(chain, [71], slots=3)


def test_a_larger_budget_takes_what_was_found_for_a_smaller_one() -> None:
    # With slots of 49 bytes the tables lead to 11 at 145 and to 4 at 120.
    chain = make_chain((15, 2.0), (35, 9.0), (45, 2.0), (30, 9.0), (30, 2.0), (35, 9.0))
    costs = [found and found.cost for found in solve_chain(chain, [146, 145, 120], slots=3)]
    assert costs == [4.0, 4.0, 4.0]


def test_a_bound_knows_what_the_rest_of_the_chain_needs_at_least() -> None:
    # In slots of 6 bytes, rounded down, cheaper schedules seem to fit.
    chain = make_chain((10, 6.0), (10, 2.0), (20, 7.0), (35, 4.0))
    (found,) = solve_chain(chain, [43], slots=7)
    assert found is not None
    assert (found.lower_bound_cost, found.cost) == (9.0, 15.0)


def test_a_bound_is_not_above_the_cost_where_sums_are_rounded() -> None:
    chain = make_chain((25, 0.6), (35, 0.1), (25, 0.3), (35, 0.5), (45, 0.2))
    found = solve_one(chain, 48)
    assert found.lower_bound_cost == found.cost == pytest.approx(1.9)

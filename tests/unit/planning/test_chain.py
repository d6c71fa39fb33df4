"""Chains that can be worked out by hand, and the known optimum of uniform ones."""

from __future__ import annotations

from math import comb

import pytest

from fxmem.planning.strategies.chains.chain import (
    Chain,
    Kept,
    Recomputed,
    Schedule,
    Stage,
    StageOption,
    measure_schedule,
)
from fxmem.planning.strategies.chains.solver import find_least_memory, solve_chain


def make_chain(*stages: tuple[int, float], around: int = 1) -> Chain:
    """Stages of (saved bytes, cost) whose boundaries hold as much as each other."""
    return Chain(
        tuple(Stage(around, 0, cost, (StageOption(saved),)) for saved, cost in stages),
    )


def solve_one(chain: Chain, budget: int) -> tuple[Schedule, int, float]:
    """A schedule, its peak and its cost."""
    (found,) = solve_chain(chain, [budget])
    assert found is not None
    return found, *measure_schedule(chain, found)


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
    _, _, cost = solve_one(chain, checkpoints + 1 + 100)
    assert cost == count_advances(steps, checkpoints)


def test_what_does_not_fit_is_run_again_where_that_is_cheapest() -> None:
    # Saved with the input 1: 10 + 20 + 30 + 1 = 61. One byte less and some stage has to go; the
    # last is at hand anyway, and of the first two the second frees more but costs more.
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    assert solve_one(chain, 61)[0] == (Kept(0), Kept(1), Kept(2))
    first = (Recomputed(0, 1, (Kept(0),)), Kept(1), Kept(2))
    assert solve_one(chain, 60) == (first, 1 + 1 + 20 + 30, 2.0)
    # 52 is what that takes; below it the second goes: 1 + 10 + 1 + 30.
    second = (Kept(0), Recomputed(1, 2, (Kept(1),)), Kept(2))
    assert solve_one(chain, 51) == (second, 42, 3.0)
    # A region for each takes 1 + 1 + 1 + 30, one for both a byte less: its body takes 1 + 10 + 20.
    both = (Recomputed(0, 2, (Kept(0), Kept(1))), Kept(2))
    assert solve_one(chain, 32) == (both, 32, 5.0)
    assert find_least_memory(chain) == 32


def test_a_body_nests_a_region_where_it_is_too_large_itself() -> None:
    # The last stage leaves room for one boundary only; the two before do not fit side by side.
    chain = make_chain((20, 1.0), (20, 10.0), (30, 5.0))
    body = (Recomputed(0, 1, (Kept(0),)), Kept(1))
    # The first stage runs three times, the second twice.
    found = solve_one(chain, 32)
    assert found == ((Recomputed(0, 2, body), Kept(2)), 32, 1.0 + 10.0 + 1.0)


def test_a_smaller_option_is_taken_where_it_costs_less_than_running_again() -> None:
    options = (StageOption(40), StageOption(25, cost=0.5))
    chain = Chain((Stage(1, 0, 2.0, options), Stage(1, 0, 2.0, (StageOption(40),))))
    assert solve_one(chain, 81)[0] == (Kept(0, 0), Kept(1, 0))
    assert solve_one(chain, 80) == ((Kept(0, 1), Kept(1, 0)), 66, 0.5)
    assert solve_one(chain, 65)[1:] == (42, 2.0)


def test_peaks_count_what_is_held_where_backward_stands() -> None:
    option = StageOption(10, forward_peak_bytes=3, backward_peak_bytes=5)
    stages = (Stage(1, 2, 1.0, (option,), 4, held_bytes=50), Stage(1, 2, 1.0, (option,), 4))
    chain = Chain(stages, output_bytes=0, gradient_bytes=7)
    # Backward of the first stage: 50 held, input 1, saved 10, gradients 2 and 2, transient 5.
    assert measure_schedule(chain, (Kept(0), Kept(1)))[0] == 70
    assert find_least_memory(chain) == 70
    # Of the second: input 1, saved 20, gradients 2 and 7, transient 5; nothing held.
    light = Chain((Stage(1, 2, 1.0, (option,), 4), stages[1]), gradient_bytes=7)
    assert measure_schedule(light, (Kept(0), Kept(1)))[0] == 35
    # In a region the first keeps its output 1 only.
    region = Recomputed(0, 1, (Kept(0),))
    assert measure_schedule(light, (region, Kept(1)))[0] == 26


def test_forward_has_no_gradient_yet_and_what_is_run_again_has_the_one_of_its_output() -> None:
    last = Stage(0, 6, 1.0, (StageOption(10, forward_peak_bytes=200),))
    chain = Chain((Stage(0, 0, 1.0, (StageOption(10),)), last), gradient_bytes=100)
    # Forward of the last stage: saved 10, transient 200; in backward 10 and gradients 6 and 100.
    assert measure_schedule(chain, (Recomputed(0, 1, (Kept(0),)), Kept(1)))[0] == 210
    # Run again it has the gradient 100 beside it, and what the first stage saved.
    assert measure_schedule(chain, (Recomputed(0, 2, (Kept(0), Kept(1))),))[0] == 320


def test_a_region_at_the_end_of_a_body_is_only_run_once_more() -> None:
    chain = make_chain((10, 1.0), (10, 2.0), (10, 4.0))
    body = (Kept(0), Recomputed(1, 2, (Kept(1),)))
    assert measure_schedule(chain, (Recomputed(0, 2, body), Kept(2)))[1] == 3.0


def test_budgets_come_in_any_order_and_more_than_once() -> None:
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    found = solve_chain(chain, [60, 31, 1000, 60, 41])
    costs = [schedule and measure_schedule(chain, schedule)[1] for schedule in found]
    assert costs == [2.0, None, 0.0, 2.0, 5.0]
    assert solve_chain(chain, []) == ()

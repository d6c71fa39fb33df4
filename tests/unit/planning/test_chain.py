"""The known optimum of uniform chains; others are held against all schedules by property."""

from __future__ import annotations

from math import comb

import pytest

from fxmem.planning.strategies.chains.chain import Chain, Stage, StageOption, measure_schedule
from fxmem.planning.strategies.chains.solver import solve_chain


def make_chain(*stages: tuple[int, float], around: int = 1) -> Chain:
    """Stages of (saved bytes, cost) whose boundaries hold as much as each other."""
    return Chain(
        tuple(Stage(around, 0, cost, (StageOption(saved),)) for saved, cost in stages),
    )


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
    (found,) = solve_chain(chain, [checkpoints + 1 + 100])
    assert found is not None
    assert measure_schedule(chain, found)[1] == count_advances(steps, checkpoints)


def test_budgets_come_in_any_order_and_more_than_once() -> None:
    chain = make_chain((10, 2.0), (20, 3.0), (30, 1.0))
    found = solve_chain(chain, [60, 31, 1000, 60, 41])
    costs = [schedule and measure_schedule(chain, schedule)[1] for schedule in found]
    assert costs == [2.0, None, 0.0, 2.0, 5.0]
    assert solve_chain(chain, []) == ()

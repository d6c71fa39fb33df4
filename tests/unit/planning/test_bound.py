"""The bound below every plan, where it can be reached."""

from __future__ import annotations

import ctypes
import math

import pytest
from torch import nn

from fxmem import analyze
from fxmem.planning.model.index import build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.score import Scorer
from fxmem.planning.strategies.bound import _Solver, bound_cost


def test_what_exceeds_the_peak_is_computed_again_by_its_cheapest_share() -> None:
    """x -> tanh -> tanh -> tanh: at the start of backward all three results are alive.

    The last one is the output, which the caller holds; backward takes it out first. One of the
    other two has to be gone for a peak that is lower by its size, at the cost of one tanh.
    """
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Tanh(), nn.Tanh())
    analysis = analyze(model, ("1000x1000",), device="cpu")
    facts = build_index(analysis.graph)
    costs = [float(o.name == "aten.tanh.default") for o in analysis.graph.operations]
    peak, _ = Scorer(facts, costs).score(())
    assert bound_cost(facts, find_limits(facts), costs, peak) == 0
    for missing_bytes in (2_000_000, 4_000_000):  # a storage is there or gone, and not by half
        assert bound_cost(facts, find_limits(facts), costs, peak - missing_bytes) == 1


def test_what_one_operator_of_backward_holds_fits_in_no_plan() -> None:
    """x -> linear -> tanh -> tanh: the peak is at the backward of the first tanh.

    It takes its result and a gradient and makes another, 12 MB; the input, the weight and the
    output are held by the caller. There is nothing that could be gone, and computed again later.
    """
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Tanh())
    analysis = analyze(model, ("1000x1000",), device="cpu")
    facts = build_index(analysis.graph)
    limits, costs = find_limits(facts), [1.0] * len(analysis.graph.operations)
    assert analysis.peak_bytes == 6 * 4_000_000 + 4_000 + 8  # bias, loss, its gradient
    assert bound_cost(facts, limits, costs, analysis.peak_bytes) == 0
    for peak_bytes in (analysis.peak_bytes - 1, 1_000_000, 0):
        assert math.isinf(bound_cost(facts, limits, costs, peak_bytes))


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    _Solver()  # releases from 1.16 on print their name when a solver is made
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")

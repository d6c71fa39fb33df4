"""Plans that fit a GPU, and the place of the peak, against the model with the plan applied."""

from __future__ import annotations

import dataclasses

import pytest
from hand_made import make_analysis
from torch import nn

import fxmem
from fxmem.gpus import CONTEXT_BYTES
from fxmem.planning import planner
from fxmem.planning.outcome import find_shortage
from fxmem.planning.plan import Plan
from fxmem.planning.planner import plan_fitting


def make_model() -> nn.Module:
    """Its saved activations are what takes memory: 1 GiB for each of 8 layers."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(64, 1))


INPUT = f"{4 * 1024**2}x64"


@pytest.fixture(scope="module")
def analysis() -> fxmem.Analysis:
    return fxmem.analyze(make_model(), (INPUT,), optimizer="adam", gpu="rtx3070")


@pytest.fixture(scope="module")
def front(analysis: fxmem.Analysis) -> tuple[Plan, ...]:
    return fxmem.pareto(analysis, points=1000, strategy="schedules")


def test_the_cheapest_that_fits_is_planned(
    analysis: fxmem.Analysis, front: tuple[Plan, ...]
) -> None:
    assert analysis.exhaustion is not None and analysis.gpu is not None
    chosen = plan_fitting(analysis)
    planned = fxmem.apply(make_model(), chosen)
    again = fxmem.analyze(planned, (INPUT,), optimizer="adam", gpu="rtx3070")
    assert again.exhaustion is None
    assert again.peak_bytes == chosen.peak_bytes
    memory = analysis.gpu.capacity_bytes, max(CONTEXT_BYTES)
    fitting = next(plan for plan in front if not find_shortage(analysis, plan, *memory))
    assert chosen.overhead <= fitting.overhead


def test_a_step_that_fits_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(planner, "run_strategy")
    analysis = fxmem.analyze(make_model(), "64x64", gpu="rtx3070")
    assert plan_fitting(analysis).segments == ()


def test_no_plan_may_fit() -> None:
    analysis = fxmem.analyze(nn.Linear(64, 64), f"{64 * 1024**2}x64", gpu="rtx3070")
    with pytest.raises(fxmem.InfeasibleError, match=r"^no plan was found whose step fits NVIDIA "):
        plan_fitting(analysis)
    with pytest.raises(fxmem.UsageError, match=r"^fitting a GPU needs a GPU"):
        plan_fitting(make_analysis())


def test_the_new_peak_is_where_the_planned_model_has_it(
    analysis: fxmem.Analysis, front: tuple[Plan, ...]
) -> None:
    for plan in front[1], front[-1]:
        planned = plan.find_step(analysis)
        again = fxmem.analyze(fxmem.apply(make_model(), plan), (INPUT,), optimizer="adam")
        assert planned is not None
        assert planned.setup == analysis.setup
        assert planned.peak.nbytes == again.peak_bytes
        assert planned.peak.phase is again.peak.phase
        assert planned.peak.operation.name == again.peak.operation.name
    assert front[0].segments == ()
    assert front[0].find_step(analysis) is analysis
    unexplained = dataclasses.replace(front[1], peak_bytes=front[1].peak_bytes - 1)
    assert unexplained.find_step(analysis) is None

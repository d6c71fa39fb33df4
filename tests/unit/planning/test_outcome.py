"""Plans that fit a GPU, and the place of the peak, against the model with the plan applied."""

from __future__ import annotations

import dataclasses

import pytest
from hand_made import make_analysis
from torch import Tensor, nn

import fxmem
from fxmem.planning.outcome import choose_fitting, find_planned_step
from fxmem.planning.plan import Plan


def make_model() -> nn.Module:
    """Its saved activations are what takes memory: 1 GiB for each of 12 layers."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(64, 1))


INPUT = f"{4 * 1024**2}x64"


@pytest.fixture(scope="module")
def analysis() -> fxmem.Analysis:
    return fxmem.analyze(make_model(), (INPUT,), optimizer="adam", gpu="rtx3070")


@pytest.fixture(scope="module")
def front(analysis: fxmem.Analysis) -> tuple[Plan, ...]:
    return fxmem.pareto(analysis, points=1000, strategy="schedules")


def test_the_first_that_fits_is_chosen(analysis: fxmem.Analysis, front: tuple[Plan, ...]) -> None:
    assert analysis.exhaustion is not None
    chosen = choose_fitting(analysis, front)
    planned = fxmem.apply(make_model(), chosen)
    again = fxmem.analyze(planned, (INPUT,), optimizer="adam", gpu="rtx3070")
    assert again.exhaustion is None
    assert again.peak_bytes == chosen.peak_bytes
    before = front[front.index(chosen) - 1]
    again = fxmem.analyze(
        fxmem.apply(make_model(), before), (INPUT,), optimizer="adam", gpu="rtx3070"
    )
    assert again.exhaustion is not None
    with pytest.raises(fxmem.InfeasibleError, match=r"^no plan was found whose step fits NVIDIA "):
        choose_fitting(analysis, front[:2])
    with pytest.raises(fxmem.UsageError, match=r"^fitting a GPU needs a GPU"):
        choose_fitting(make_analysis(), ())


class Hoarding(nn.Module):
    """Holds on to 1 GiB after each of 12 layers, and uses none of it."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _ in range(12):
            features.append(features[-1].sin())
        return features[-1]


def test_an_inference_fits_once_it_lets_go() -> None:
    analysis = fxmem.analyze(Hoarding(), (INPUT,), mode="infer", gpu="rtx3070")
    assert analysis.exhaustion is not None
    plan = dataclasses.replace(fxmem.plan(analysis), inplace=())
    assert plan.dels
    assert choose_fitting(analysis, [plan]) is plan


def test_the_new_peak_is_where_the_planned_model_has_it(
    analysis: fxmem.Analysis, front: tuple[Plan, ...]
) -> None:
    for plan in front[1], front[-1]:
        planned = find_planned_step(analysis, plan)
        again = fxmem.analyze(fxmem.apply(make_model(), plan), (INPUT,), optimizer="adam")
        assert planned is not None
        assert planned.setup == analysis.setup
        assert planned.peak.nbytes == again.peak_bytes
        assert planned.peak.phase is again.peak.phase
        assert planned.peak.operation.name == again.peak.operation.name
    assert front[0].segments == ()
    assert find_planned_step(analysis, front[0]) is analysis
    unexplained = dataclasses.replace(front[1], peak_bytes=front[1].peak_bytes - 1)
    assert find_planned_step(analysis, unexplained) is None

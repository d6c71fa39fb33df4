"""Plans from the public interface: the peak they promise is that of the applied model's step."""

from __future__ import annotations

import pytest
import torch
from planned_models import PLANNED

import fxmem

SETTINGS = {
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda", "optimizer": "adam"},
    "cuda, bf16": {"device": "cuda", "autocast": "bf16"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", PLANNED)
def test_promised_peaks_are_recorded(name: str, settings: str) -> None:
    make, spec = PLANNED[name]
    torch.manual_seed(0)
    model, options = make(), SETTINGS[settings]
    analysis = fxmem.analyze(model, (spec,), **options)
    front = fxmem.pareto(analysis, points=3, time_limit_s=2)
    assert front[0].segments == ()
    # Even so its values go after their last use, and not with the frames of the user's code.
    assert front[0].peak_bytes <= front[0].baseline_peak_bytes == analysis.peak_bytes
    for plan in front:
        recorded = fxmem.analyze(fxmem.apply(model, plan), (spec,), **options)
        assert plan.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.01)
        assert plan.reserved_bytes == pytest.approx(recorded.reserved_bytes, rel=0.05)
        more_flops = recorded.forward_flops + recorded.backward_flops
        step_flops = analysis.forward_flops + analysis.backward_flops
        assert more_flops == pytest.approx(step_flops * (1 + plan.overhead_flops))


def test_a_budget_is_kept_and_a_looser_one_costs_no_more() -> None:
    make, spec = PLANNED["residual"]
    model = make()
    analysis = fxmem.analyze(model, (spec,), device="cpu")
    leanest = fxmem.pareto(analysis, time_limit_s=2)[-1].peak_bytes
    costs = []
    for part in (0.2, 0.5, 0.8):
        budget = int(leanest + part * (analysis.peak_bytes - leanest))
        plan = fxmem.plan(analysis, budget=budget, time_limit_s=2)
        assert plan.peak_bytes <= budget
        assert plan.gap is not None and plan.lower_bound_overhead <= plan.overhead
        costs.append(plan.overhead)
    assert costs == sorted(costs, reverse=True)


def test_an_overhead_is_kept() -> None:
    make, spec = PLANNED["unet"]
    analysis = fxmem.analyze(make(), (spec,), device="cpu")
    by_time = fxmem.plan(analysis, max_overhead=0.1, time_limit_s=2)
    by_flops = fxmem.plan(analysis, max_overhead_flops=0.05, time_limit_s=2)
    assert by_time.overhead <= 0.1
    assert by_flops.overhead_flops <= 0.05
    assert max(by_time.peak_bytes, by_flops.peak_bytes) < analysis.peak_bytes

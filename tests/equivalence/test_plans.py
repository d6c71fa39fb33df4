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

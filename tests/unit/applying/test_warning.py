"""Warnings stand at the line that called the model."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

import fxmem

X = torch.randn(512, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), *[nn.Tanh() for _ in range(6)])
        self.scale = 1.0

    def forward(self, x: Any) -> Any:
        return self.layers(x) * self.scale


def make() -> tuple[Net, nn.Module]:
    model = Net()
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=1)[-1]
    assert plan.segments
    return model, fxmem.apply(model, plan)


def test_a_step_without_the_plan_is_told_at_the_call() -> None:
    model, planned = make()
    planned.register_forward_hook(lambda *_: None)
    around = nn.Sequential(planned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.graph.disable_saved_tensors_hooks("no segment can run again"):
            planned(X)  # the call
        model.scale = 2.0
        around(X)  # the call
    lines, first = inspect.getsourcelines(test_a_step_without_the_plan_is_told_at_the_call)
    calls = {first + at for at, line in enumerate(lines) if line.endswith("# the call\n")}
    assert {(w.filename, w.lineno) for w in caught} == {(__file__, line) for line in calls}
    assert {w.category for w in caught} == {fxmem.FxmemWarning}

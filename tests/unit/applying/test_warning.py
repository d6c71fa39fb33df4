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


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def make() -> tuple[Net, nn.Module]:
    model = Net()
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=1)[-1]
    assert plan.segments
    return model, fxmem.apply(model, plan)


def find_line(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if text in line)


def test_a_step_without_the_plan_is_told_at_the_call() -> None:
    model, planned = make()
    model.scale = 2.0
    planned.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(X)  # the call
        Around(planned)(X)
    here = find_line(test_a_step_without_the_plan_is_told_at_the_call, "# the call")
    within = find_line(Around, "self.inner(x)")
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, here), (__file__, within)]
    assert {w.category for w in caught} == {fxmem.FxmemWarning}


def test_so_is_a_segment_that_cannot_run_again() -> None:
    _, planned = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            planned(X)  # the call
    line = find_line(test_so_is_a_segment_that_cannot_run_again, "# the call")
    assert {(w.filename, w.lineno) for w in caught} == {(__file__, line)}

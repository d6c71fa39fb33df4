"""Autocast, and what wants gradients: where they are not as for the plan, code may do otherwise."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fxmem

pytestmark = pytest.mark.usefixtures("every_warning")
X = torch.randn(64, 16)


def make_layers(count: int = 3) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(count)]
    return nn.Sequential(*blocks)


class Drop(nn.Module):
    """Drops samples, as DropPath of timm does: by a mask of the dtype of what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y * (torch.rand(len(x), 1) > 0.2).to(y.dtype) / 0.8
        return x


class Teacher(nn.Module):
    """Learns from what it computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_layers(1).requires_grad_(False)
        self.layers = make_layers()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return (self.layers(x) - taught).square().mean()


def plan(model: nn.Module, autocast: str | None = None) -> fxmem.Plan:
    analysis = fxmem.analyze(model, (X,), device="cpu", autocast=autocast)
    found = fxmem.pareto(analysis, time_limit_s=1)[-1]
    assert found.style == "graph" and found.segments
    return found


def step(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    context: Any = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    with context:
        output = model(x)
    output.float().square().mean().backward()
    return [output.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]]


def assert_same(model: nn.Module, planned: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Both compute the same from inputs that want gradients as ``X`` does."""
    results = []
    for run in (copy.deepcopy(model), planned):
        x = X.detach().clone().requires_grad_(X.requires_grad)
        results.append([None if g is None else g.clone() for g in step(run, x, dtype)])
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


DTYPES = [(None, torch.bfloat16), ("bf16", None), ("bf16", torch.float16)]


@pytest.mark.parametrize("analysed, trained", DTYPES)
def test_a_dtype_that_code_asked_for_under_another_autocast_is_not_baked_in(
    analysed: str | None, trained: torch.dtype | None, traces: list[bool]
) -> None:
    model = Drop()
    planned = fxmem.apply(model, plan(model, analysed))
    for _ in range(2):
        with pytest.warns(fxmem.FxmemWarning) as caught:
            assert_same(model, planned, trained)
        assert [str(warning.message) for warning in caught] == [
            "autocast is not what it was for the plan, and the model's code may do other things"
            " with it: this step runs without the plan (one of style 'modules' runs that code)"
        ]
    assert traces == [False]
    assert_same(model, planned, torch.bfloat16 if analysed else None)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_knows_the_autocast_of_the_plan(make: Any, traces: list[bool]) -> None:
    model = Drop()
    planned = make(fxmem.apply(model, plan(model, "bf16")))
    assert_same(model, planned, torch.bfloat16)
    assert traces == []


def test_autocast_that_code_does_not_ask_for_runs_by_the_plan(traces: list[bool]) -> None:
    model = make_layers()
    planned = fxmem.apply(model, plan(model))
    for _ in range(2):
        assert_same(model, planned, torch.bfloat16)
    assert traces == [True]


def test_an_input_that_wants_a_gradient_gets_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Teacher()
    planned = fxmem.apply(model, plan(model))
    assert_same(model, planned)
    monkeypatch.setitem(globals(), "X", X.clone().requires_grad_())
    with pytest.warns(fxmem.FxmemWarning, match="this step runs without it"):
        assert_same(model, planned)


@pytest.mark.parametrize("applied", [True, False])
def test_a_module_that_is_unfrozen_gets_the_model_s_gradients(applied: bool) -> None:
    model = Teacher()
    found = plan(model)
    planned = fxmem.apply(model, found) if applied else model
    model.requires_grad_(True)
    if not applied:
        planned = fxmem.apply(model, found)
    with pytest.warns(fxmem.FxmemWarning) as caught:
        assert_same(model, planned)
    assert str(caught[0].message) == (
        "which parameters want gradients, or their dtypes, is not as for the plan, and the model's"
        " code may do other things with it: this step runs without the plan (one of style"
        " 'modules' runs that code)"
    )


def test_frozen_layers_run_by_the_plan_where_the_code_has_nothing_to_ask(
    traces: list[bool],
) -> None:
    model = make_layers()
    planned = fxmem.apply(model, plan(model))
    model[0].requires_grad_(False)
    for _ in range(2):
        assert_same(model, planned)
    assert traces == [True]


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2 + torch.tanh(weight)


def test_cached_parametrizations_are_not_computed_again() -> None:
    model = make_layers()
    for block in model:
        parametrize.register_parametrization(block[0], "weight", Double())
    planned = fxmem.apply(model, plan(model))
    with parametrize.cached():
        expected = torch.autograd.grad((model(X) + model(-X)).sum(), [*model.parameters()])
    with parametrize.cached(), pytest.warns(fxmem.FxmemWarning, match="parametrize.cached"):
        found = planned(X) + planned(-X)
    assert all(map(torch.equal, torch.autograd.grad(found.sum(), [*model.parameters()]), expected))

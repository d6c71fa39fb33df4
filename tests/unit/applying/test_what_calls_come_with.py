"""What code may ask of a call, beside sizes: defaults, which tensors are one, and what is held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem

pytestmark = pytest.mark.usefixtures("every_warning")
X = torch.randn(64, 16)
Code = Callable[..., Any]


class Net(nn.Module):
    """Layers with a weight that has two names, and code around them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        self.layers, self.code = nn.Sequential(*blocks), code
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.25)
        self.register_buffer("mask", None)
        self.register_buffer("table", torch.ones(4, 16))


def look(model: Any, x: Tensor) -> Tensor:
    y = model.layers(F.linear(x, model.first.weight))
    if model.mask is not None:
        y = y * model.mask
    return F.linear(y, model.last.weight) / model.table.shape[0] / model.norm.weight.shape[0]


def flag(model: Any, x: Tensor, double: bool = False, scale: float | None = 2.0) -> Tensor:
    y: Tensor = model.layers(x) if scale is None else model.layers(x) * scale
    return y * 3 if double else y


def compare(model: Any, x: Tensor, y: Tensor) -> Tensor:
    z: Tensor = model.layers(x)
    return z * 2 if x is y else z + model.layers(y)


def add(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model.layers(x) + y  # type: ignore[no-any-return]


def go_through(model: Any, x: Tensor, **others: Tensor) -> Tensor:
    for other in others.values():
        x = model.layers(x) - other
    return x


def ask(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.layers(x).to(torch.get_default_dtype())
    return y * 2 if x.stride(0) == 1 else y


def make(code: Code, *args: Tensor, **kwargs: Any) -> tuple[Any, Any]:
    """A model and its twin with a plan for these arguments."""
    torch.manual_seed(0)
    kind: Any = type("Net", (Net,), {"forward": code})
    model = kind(code)
    analysis = fxmem.analyze(model, args, kwargs, device="cpu")
    plan = fxmem.pareto(analysis, time_limit_s=0.2)[-1]
    assert plan.style == "graph" and plan.segments
    return copy.deepcopy(model), fxmem.apply(model, plan)


def assert_planned(pair: tuple[Any, Any], *args: Tensor, **kwargs: Any) -> None:
    model, planned = pair
    assert planned._fxmem_choose(args, kwargs) is not None
    assert run(planned, *args, **kwargs).equal(run(model, *args, **kwargs))


def assert_told(told: str, pair: tuple[Any, Any], *args: Tensor, **kwargs: Any) -> None:
    """It runs without the plan, and says why."""
    model, planned = pair
    for _ in range(2):
        with pytest.warns(fxmem.FxmemWarning, match=told):
            found = run(planned, *args, **kwargs)
        assert found.equal(run(model, *args, **kwargs))


def run(model: nn.Module, *args: Tensor, **kwargs: Any) -> Tensor:
    torch.manual_seed(1)
    return model(*args, **kwargs)  # type: ignore[no-any-return]


def test_what_is_not_given_is_the_default() -> None:
    pair = make(flag, X, double=True)
    assert_planned(pair, X, double=True)
    assert_told(r"other arguments \(double=False\)", pair, X)
    pair = make(flag, X, double=False)
    assert_planned(pair, X)


def test_what_is_given_beside_is_the_default() -> None:
    pair = make(flag, X)
    assert_planned(pair, X, double=False, scale=2.0)
    assert_told(r"other arguments \(scale\)", pair, X, scale=None)


def test_arguments_without_names_come_in_their_order() -> None:
    one, other = X + 1, X + 2
    pair = make(go_through, X, one=one, other=other)
    assert_planned(pair, X, one=one, other=other)
    told = r"other arguments \(in another order: other, one\)"
    assert_told(told, pair, X, other=other, one=one)


def test_tensors_that_are_one() -> None:
    other = X + 1
    pair = make(compare, X, other)
    assert_planned(pair, X, other)
    assert_told("for arguments like these", pair, X, X)
    pair = make(compare, X, X)
    assert_planned(pair, X, X)
    assert_told("for arguments like these", pair, X, other)
    assert_planned(make(add, X, other), X, X)


def test_strides_and_the_default_dtype_are_asked_for() -> None:
    x = torch.randn(16, 64).t()
    pair = make(ask, x)
    assert_planned(pair, x)
    assert_told("for arguments like these", pair, X[:, :1].expand(64, 16))
    torch.set_default_dtype(torch.float64)
    try:
        assert_told("^the default dtype is not what it was", pair, x)
    finally:
        torch.set_default_dtype(torch.float32)


def set_mask(model: Any) -> None:
    model.mask = torch.arange(16.0)


def replace_buffer(model: Any) -> None:
    model.table = torch.ones(8, 16)


def replace_parameter(model: Any) -> None:
    model.norm.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("change", [set_mask, replace_buffer, replace_parameter])
def test_sizes_of_what_is_held(change: Callable[[Any], None]) -> None:
    pair = make(look, X)
    assert_planned(pair, X)
    for model in pair:
        change(model)
    assert_told("^the size of a parameter or buffer is not what it was", pair, X)


@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_were_one(copied: bool) -> None:
    model, planned = make(look, X)
    pair = model, copy.deepcopy(planned) if copied else planned
    for each in pair:
        each.load_state_dict({n: t.clone() for n, t in each.state_dict().items()}, assign=True)
    assert_told("^what were one parameter or buffer for the plan are two", pair, X)
    for each in pair:
        each.last.weight = each.first.weight
    assert_planned(pair, X)


def read_parts(model: Any, x: Tensor) -> Tensor:
    y = F.dropout(model.layers(x), model.drop.p, model.drop.training)
    return y * model.layers[1][0].weight.numel() / model.layers[1][0].out_features


def call_parts(model: Any, x: Tensor) -> Tensor:
    return model.norm(model.drop(model.layers(x)))  # type: ignore[no-any-return]


def call_forward(model: Any, x: Tensor) -> Tensor:
    return model.drop.forward(model.layers(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("code", [read_parts, call_forward])
def test_what_code_reads_of_modules_of_pytorch(code: Code) -> None:
    pair = make(code, X)
    assert_planned(pair, X)
    for model in pair:
        model.drop.p = 0.5
    assert_told(r"^drop\.p is not what it was", pair, X)
    for model in pair:
        model.drop = nn.Dropout(0.75)
    assert_told("^modules of the model were replaced", pair, X)
    for model in pair:
        model.drop = nn.Dropout(0.25)
    assert_planned(pair, X)
    for model in pair:
        model.drop.eval()
    assert_told(r"^the plan's graph has drop in the mode of the model", pair, X)


def test_what_modules_of_pytorch_read_themselves_may_change(traces: list[bool]) -> None:
    pair = make(call_parts, X)
    for model in pair:
        model.norm.eval()
    for at in range(6):
        for model in pair:
            model.drop.p = at / 8
        assert_planned(pair, X)
    assert not traces

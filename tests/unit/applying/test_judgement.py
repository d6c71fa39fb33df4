"""A graph is run where it is what the model's code does, and nothing is traced for in each call."""

from __future__ import annotations

import copy
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.applying import judgement

pytestmark = pytest.mark.usefixtures("every_warning")
X = torch.randn(32, 16)


class Block(nn.Module):
    """Reads attributes in each of the ways that code has."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        shift = 0.5 if hasattr(self, "shifted") else 0.0
        return x + self.slope * self.layers(x) * getattr(self, "gain", 1.0) + shift


class Net(nn.Module):
    """An epoch that matters late, or for large batches; and a level that is asked for its type."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.step, self.beta = 0, 0, 0.0
        self.level: Any = 0
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        for block in self.blocks:
            y = block(y)
        if x.dtype is torch.float64 or self.level is True or self.step > 10**6:
            y = y * 2
        if len(x) > 32 and self.epoch > 3:
            y = y * 3
        return y + self.beta


def make() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=0.2)[-1]
    assert plan.segments and plan.style == "graph"
    return copy.deepcopy(model), fxmem.apply(model, plan)


def put(pair: tuple[Net, Any], place: str, value: object) -> None:
    """Sets an attribute of the planned model, and of the one that it is compared with."""
    owner, _, name = place.rpartition(".")
    for model in (pair[0], pair[1].original):
        setattr(model.get_submodule(owner), name, value)


def assert_planned(pair: tuple[Net, Any], x: Tensor = X) -> None:
    """By the plan, as there is no warning, and the same."""
    model, planned = pair
    assert planned._fxmem_choose((x,), {}) is not None
    assert torch.equal(planned(x), model(x))


def assert_told(pair: tuple[Net, Any], message: str, x: Tensor = X) -> None:
    """Without the plan, for a reason that is told."""
    model, planned = pair
    with pytest.warns(fxmem.FxmemWarning) as caught:
        assert torch.equal(planned(x), model(x))
    assert [str(warning.message) for warning in caught] == [message]


def is_not(what: str) -> str:
    return (
        f"{what} is not what it was for the plan, and the model's code may do other things with"
        " it: this step runs without the plan (one of style 'modules' runs that code)"
    )


@pytest.mark.parametrize(("name", "value"), [("gain", 0.5), ("slope", 0.5), ("shifted", None)])
def test_attributes_that_come_later_are_seen(name: str, value: object, traces: list[bool]) -> None:
    pair = make()
    put(pair, f"blocks.1.{name}", value)
    for _ in range(2):
        assert_told(pair, is_not(f"blocks.1.{name}"))
    assert traces == [False]
    for model in (pair[0], pair[1].original):
        delattr(model.blocks[1], name)
    assert_planned(pair)


def double(self: Any, x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("place", ["blocks.1", "blocks.1.layers"])
def test_a_forward_of_its_own_is_seen(place: str) -> None:
    pair = make()
    put(pair, f"{place}.forward", MethodType(double, pair))
    assert_told(pair, is_not(f"{place}.forward"))


def test_marks_that_nobody_reads_cost_one_trace(traces: list[bool]) -> None:
    pair = make()
    for at in range(4):
        put(pair, f"blocks.1._mark_{at}", True)
        assert_planned(pair)
    assert traces == [True]


def test_numbers_of_another_type_are_other_values(traces: list[bool]) -> None:
    pair = make()
    for level in (1, 1.0):
        put(pair, "level", level)
        assert_planned(pair)
    put(pair, "level", True)
    assert_told(pair, is_not("level"))
    assert traces == [True, True, False]


def test_a_counter_that_the_code_reads_is_not_traced_for_in_each_step(traces: list[bool]) -> None:
    pair = make()
    for step in range(5):
        put(pair, "step", step)
        assert_planned(pair)
    message = (
        "step changes from call to call, and the model's code reads it: this step runs without the"
        " plan (one of style 'modules' runs that code)"
    )
    for step in (5, 6, 10**6 + 1):
        put(pair, "step", step)
        assert_told(pair, message)
    assert traces == [True] * 4
    put(pair, "step", 3)
    assert_planned(pair)


def test_a_compiler_sees_attributes_that_come_later() -> None:
    pair = make()
    compiled = torch.compile(pair[1], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        assert torch.equal(compiled(X), pair[0](X))
        put(pair, "blocks.1.gain", 0.5)
        assert torch.equal(compiled(X), pair[0](X))
    torch._dynamo.reset()


def test_what_other_sizes_read_is_looked_at_for_them(traces: list[bool]) -> None:
    pair = make()
    x = torch.randn(48, 16)
    for epoch in (1, 2, 3):
        put(pair, "epoch", epoch)
        assert_planned(pair)
        assert_planned(pair, x)
    put(pair, "epoch", 4)
    assert_planned(pair)
    assert_told(pair, is_not("epoch"), x)


def test_what_decides_is_named() -> None:
    pair = make()
    put(pair, "epoch", 1)
    put(pair, "beta", 0.5)
    assert_told(pair, is_not("beta"))


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (torch.randn(32, 16, dtype=torch.float64), "of these dtypes"),
        (torch.randn(48, 16, dtype=torch.float64), "of these sizes and dtypes"),
    ],
)
def test_other_dtypes_are_told(x: Tensor, what: str) -> None:
    size = "x".join(map(str, x.shape))
    assert_told(
        make(),
        f"for arguments {what} the model's code does other things than for those of the plan"
        f" (x {size}:float64): this step runs without it",
        x,
    )


def test_what_is_remembered_of_sizes_has_bounds(
    traces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "_MOST_CASES", 2)
    pair = make()
    for size in (8, 9, 10, 10, 8):
        assert_planned(pair, torch.randn(size, 16))
    assert traces == [True] * 4
    cases = [*pair[1]._judgement._others.values()]
    assert len(cases) == 2
    assert cases[0].reads is cases[1].reads is not None

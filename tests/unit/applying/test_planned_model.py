"""A planned module is its model in all but the memory that its training step takes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from leanest import apply_leanest
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem


class Net(nn.Module):
    """Dropout that code switches by the mode, a branch of its own, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        """Of the net."""
        y = torch.tanh(self.norm(self.first(x)))
        y = F.dropout(y, 0.5, self.training)
        y = self.last(y) * scale
        return y if bias is None else y + bias

    def greet(self) -> str:
        return "hello"


def make() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, apply_leanest(model, ("5x4",))


def test_state_is_the_model_s_own() -> None:
    model, planned = make()
    assert [*planned.state_dict()] == [*model.state_dict()]
    for (name, parameter), (other, own) in zip(
        model.named_parameters(), planned.named_parameters(), strict=True
    ):
        assert name == other
        assert parameter is own
    assert [name for name, _ in planned.named_modules()] == [n for n, _ in model.named_modules()]
    planned.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not any(p.any() for p in model.parameters())
    assert fxmem.unapply(planned) is model


def test_signature_and_the_rest_of_the_model_stay() -> None:
    model, planned = make()
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert planned.forward.__doc__ == "Of the net."
    assert planned.greet() == "hello"
    assert type(planned).__name__ == "Net"
    with pytest.raises(AttributeError, match="nothing"):
        _ = planned.nothing


def test_evaluation_and_inference_run_the_model_itself() -> None:
    model, planned = make()
    x = torch.randn(5, 4)
    planned.eval()
    assert not model.training
    assert not model.norm.training
    assert torch.equal(planned(x), model(x))
    assert torch.equal(planned(x), planned(x)), "dropout is off"
    planned.train()
    assert model.norm.training
    torch.manual_seed(3)
    with torch.no_grad():
        found = planned(x)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(found, model(x))


class Scaled(nn.Module):
    """Changes what an epoch may: a number and its setter, a tensor, a layer."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("weight", torch.ones(3))
        self.share = 1.0
        self.extra: nn.Module | None = None

    def set_percent(self, value: float) -> None:
        self.share = value / 100

    percent = property(lambda self: 100 * self.share, set_percent)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.last(torch.tanh(self.first(x)))) * self.share * self.weight
        return y if self.extra is None else self.extra(y)  # type: ignore[no-any-return]


LATER = {"percent": 25.0, "extra": nn.Tanh(), "weight": torch.full((3,), 2.0)}


@pytest.mark.filterwarnings("ignore:.*this step runs:fxmem.FxmemWarning")
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("style", ["graph", "modules"])
def test_what_is_set_on_a_planned_model_is_set(style: str, name: str) -> None:
    torch.manual_seed(0)
    model = Scaled()
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    plan = fxmem.pareto(fxmem.analyze(model, (x,), device="cpu"), style=style)[-1]
    planned = fxmem.apply(model, plan, (x,))
    assert torch.equal(planned(x), plain(x))
    for one in (planned, plain):
        setattr(one, name, LATER[name])
    for one in (planned, copy.deepcopy(planned), fxmem.unapply(planned)):
        one.zero_grad()
        results = one(x), plain(x)
        assert torch.equal(*results)
        results[0].sum().backward()
        expected = torch.autograd.grad(results[1].sum(), [*plain.parameters()])
        assert all(map(torch.equal, (p.grad for p in one.parameters()), expected))


def test_a_mode_that_is_set_is_the_model_s() -> None:
    model, planned = make()
    for module in planned.modules():
        module.training = False
    assert not model.training and not planned.training
    x = torch.randn(5, 4)
    assert torch.equal(planned(x), model(x))
    model.training = True
    assert planned.training


class Frozen(nn.Module):
    """Its normalisation stays as it is in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


def test_a_model_s_own_train_decides_what_trains() -> None:
    model = Frozen().train()
    analysis = fxmem.analyze(model, ("3x4",), device="cpu")
    planned = fxmem.apply(model, fxmem.pareto(analysis, strategy="schedules")[0])
    planned.train()
    assert (planned.training, model.training, model.norm.training) == (True, True, False)
    planned.eval()
    assert (planned.training, model.training) == (False, False)
    assert fxmem.verify(model, planned, ("3x4",), optimizer="adam").equal


class Overriding(nn.Module):
    """Has what every module has, but of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.counter = nn.Linear(4, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def get_extra_state(self) -> int:
        return self.counter

    def set_extra_state(self, state: int) -> None:
        self.counter = state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter([("own", self.layer.weight)])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.counter += 1
        super().zero_grad(set_to_none)

    def eval(self) -> Any:
        self.counter += 100
        return super().eval()


def plan_graph(model: nn.Module) -> Any:
    analysis = fxmem.analyze(model, "5x4", device="cpu")
    return fxmem.apply(model, fxmem.pareto(analysis, style="graph", strategy="schedules")[-1])


def test_methods_of_modules_that_a_model_overrides_are_the_model_s() -> None:
    model = Overriding()
    planned = plan_graph(model)
    assert planned.state_dict()["_extra_state"] == 1
    assert [name for name, _ in planned.named_parameters()] == ["own"]
    assert len([*planned.parameters()]) == 1
    planned.zero_grad()
    assert planned.double() is planned and planned.eval() is planned
    assert model.counter == 102 and not model.training
    assert model.layer.weight.dtype == torch.float64
    planned.load_state_dict({**model.state_dict(), "_extra_state": 7})
    assert model.counter == copy.deepcopy(planned).counter == 7


def test_a_call_of_its_own_is_kept() -> None:
    class Doubling(Overriding):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().__call__(*args, **kwargs)

    model, x = Doubling(), torch.randn(5, 4)
    planned = plan_graph(model)
    assert torch.equal(planned(x), model(x))
    assert planned.plan_calls == 1


class Named(nn.Module):
    """Has a layer of some name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(4, 4), name
        setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["plan", "plan_calls"])
def test_names_of_planned_models_may_be_the_model_s(name: str) -> None:
    model, x = Named(name), torch.randn(5, 4)
    planned = plan_graph(model)
    assert torch.equal(planned(x), model(x))
    assert getattr(planned, name) is getattr(model, name)


def test_a_forward_of_the_model_itself_is_traced_and_runs_by_the_plan() -> None:
    model, x = Overriding(), torch.randn(5, 4)
    model.forward = lambda x: torch.tanh(model.layer(x)) * 2  # type: ignore[method-assign]
    own = model.forward
    planned = plan_graph(model)
    assert torch.equal(planned(x), model(x)) and planned.plan_calls == 1
    assert vars(model)["forward"] is own

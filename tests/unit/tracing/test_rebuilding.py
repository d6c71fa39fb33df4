"""What a model returns keeps its type in the graph, or the model has no graph."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem


class Net(nn.Module):
    """A layer, and what its result is put into."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x).relu())


class Names(list[Any]):
    pass


class Halves(tuple[Tensor, ...]):
    def __new__(cls, values: Any) -> Halves:
        return super().__new__(cls, [value / 2 for value in values])


class Sorted(namedtuple("Sorted", "first second")):
    def __new__(cls, first: Tensor, second: Tensor) -> Sorted:
        return super().__new__(cls, second, first)


class Filled(OrderedDict[str, Any]):
    """As models of Hugging Face return them."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


@dataclasses.dataclass
class Found(Filled):
    value: Tensor | None = None
    hidden: Any = None


@dataclasses.dataclass
class Doubled(Filled):
    value: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.value is not None
        self.value = self.value * 2
        super().__post_init__()


@dataclasses.dataclass
class Scored:
    value: Tensor
    score: float | None = 0.5
    unset: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Scaled:
    value: Tensor

    def __post_init__(self) -> None:
        self.value = self.value * 2


@dataclasses.dataclass
class Own:
    value: Tensor

    def __init__(self, value: Tensor) -> None:
        self.value = value * 2


def set_later(y: Tensor) -> Scored:
    scored = Scored(y)
    scored.unset = y * 2
    return scored


def apply_plan(model: nn.Module) -> nn.Module:
    analysis = fxmem.analyze(model, ("3x4",), device="cpu")
    return fxmem.apply(model, fxmem.pareto(analysis, style="graph", time_limit_s=0.1)[0])


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if dataclasses.is_dataclass(a) and vars(a).keys() != vars(b).keys():
        return False
    if dataclasses.is_dataclass(a) and not all(map(is_same, vars(a).values(), vars(b).values())):
        return False
    if isinstance(a, dict):
        a, b = [*a.items(), type(a)], [*b.items(), type(b)]
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and (dataclasses.is_dataclass(a) or bool(a == b))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: OrderedDict(b=y, a=y * 2),
        lambda y: {"shape": y.shape, "value": [y]},
        lambda y: Scored(y, None),
        lambda y: Found(y),
        lambda y: Found(None, (y, Found(y, [y]))),
    ],
)
def test_outputs_keep_their_types(wrap: Callable[[Tensor], Any]) -> None:
    model = Net(wrap)
    planned = apply_plan(model)
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        assert is_same(planned(x), model(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: defaultdict(list, value=y),
        lambda y: Counter(value=y),
        lambda y: Halves([y]),
        lambda y: Sorted(y, y * 2),
        lambda y: Doubled(y),
        lambda y: Scaled(y),
        lambda y: Own(y),
        set_later,
        lambda y: Names([y]),
    ],
)
def test_what_its_class_would_make_otherwise_is_in_no_graph(wrap: Callable[[Tensor], Any]) -> None:
    analysis = fxmem.analyze(Net(wrap), ("3x4",), device="cpu")
    kind = type(wrap(torch.ones(1))).__name__
    assert analysis.setup.frontend_reason == f"no graph holds the {kind} in the output"


class Measure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size) -> Tensor:
        return x / shape.numel()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def test_functions_of_the_user_s_get_sizes_as_they_are() -> None:
    model = Net(lambda y: Measure.apply(y, y.shape))
    x = torch.randn(3, 4)
    assert torch.equal(apply_plan(model)(x), model(x))

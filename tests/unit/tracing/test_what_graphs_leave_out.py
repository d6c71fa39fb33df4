"""Code whose graph would compute something else, or leave something out: contexts and states."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem

Pair = namedtuple("Pair", "first second")


class Net(nn.Module):
    """A layer, and what some function makes of its result."""

    def __init__(self, run: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.run = run
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.layer(x))


def analyse(run: Callable[[Net, Tensor], Any], **options: Any) -> tuple[Net, fxmem.Analysis]:
    torch.manual_seed(0)
    model = Net(run)
    return model, fxmem.analyze(model, ("3x4",), device="cpu", **options)


def verify(run: Callable[[Net, Tensor], Any], **options: Any) -> bool:
    """Whether the plan that computes nothing again changes nothing."""
    model, analysis = analyse(run, **options)
    assert analysis.frontend == "fx", analysis.setup.frontend_reason
    planned = fxmem.apply(model, fxmem.pareto(analysis, time_limit_s=0.1)[0])
    return fxmem.verify(model, planned, ("3x4",), optimizer="adam", **options).equal


def gate_without_gradients(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(y * 2)
        net.mean.lerp_(y.mean(0), 0.1)
    return y * gate + net.mean


def cosine_without_autocast(net: Net, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        scores = y.float() @ y.float().t()
    return scores @ y


def indices_without_gradients(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        order = y.argsort(-1)
    return y.gather(-1, order)


def layer_of_data_without_gradients(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        table = torch.arange(4.0).sin()
    return y * table


@pytest.mark.parametrize(
    "run", [gate_without_gradients, indices_without_gradients, layer_of_data_without_gradients]
)
def test_what_runs_without_gradients_does_in_the_graph(run: Callable[[Net, Tensor], Any]) -> None:
    assert verify(run)


def test_what_runs_without_autocast_does_in_the_graph() -> None:
    assert verify(cosine_without_autocast, autocast="bf16")
    assert verify(cosine_without_autocast)


def test_named_tuples_stay_what_they_are() -> None:
    def pair(net: Net, y: Tensor) -> Any:
        return Pair(y, {"best": y.max(-1), "again": Pair(y * 2, None)})

    assert verify(pair)
    model, analysis = analyse(pair)
    found = fxmem.apply(model, fxmem.pareto(analysis, time_limit_s=0.1)[0])(torch.randn(3, 4))
    assert type(found) is Pair and type(found.second["again"]) is Pair
    assert type(found.second["best"]) is torch.return_types.max


def cast(net: Net, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.other(y).float()


def freeze(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        shift = net.other(y)
    return y + shift


def count(net: Net, y: Tensor) -> Tensor:
    net.calls += 1
    return y * net.calls


def remember(net: Net, y: Tensor) -> Tensor:
    net.last = y.detach()
    return y * 2


def draw(net: Net, y: Tensor) -> Tensor:
    return y * random.random()


def drop(net: Net, y: Tensor) -> Tensor:
    return net.other(y) if torch.rand([]) < 0.9 else y * 2


REASONS = {
    "autocast": (cast, "the code itself turns autocast on or off"),
    "gradients": (freeze, "the code itself turns gradients on or off"),
    "counter": (count, "the model changes what it holds in its forward"),
    "tensor": (remember, "the model changes what it holds in its forward"),
    "random": (draw, "it draws random numbers that are not PyTorch's"),
    "drawn way": (drop, "a random draw decides which way it goes"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_no_graph_would_do_again_has_none(name: str) -> None:
    run, reason = REASONS[name]
    _, analysis = analyse(run)
    assert (analysis.frontend, analysis.setup.frontend_reason) == ("record", reason)

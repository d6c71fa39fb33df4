"""Changes of what a segment reads between forward and backward: refused where gradients differ."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.planning.plan import Plan, Segment

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def make(style: str) -> tuple[Net, nn.Module]:
    """A model, and one with a plan that recomputes its block."""
    torch.manual_seed(0)
    model = Net()
    planned = copy.deepcopy(model)
    analysis = fxmem.analyze(planned, (f"3x{WIDTH}",), device="cpu")
    names = [node.name for node in analysis.nodes if node.name.startswith("first.")]
    segment = Segment(names[0], names[-1], len(names), fqn="first", norms=("first.norm",))
    front = fxmem.pareto(analysis, time_limit_s=0.1)
    graph = analysis.fx_graph if style == "graph" else None
    plan = Plan(front[0].fingerprint, 1, 1, segments=(segment,), fx_graph=graph, style=style)
    return model, fxmem.apply(planned, plan)


def change_input(model: nn.Module, x: Tensor) -> None:
    x.zero_()


def step_block(model: nn.Module, x: Tensor) -> None:
    parameters = [*model.get_submodule("first").parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters).step()


def freeze_weight(model: nn.Module, x: Tensor) -> None:
    model.get_parameter("first.linear.weight").requires_grad_(False)


CHANGES = {
    "its input was modified in place since forward": change_input,
    r"its parameter of \(.*\) was modified or replaced since forward": step_block,
    "parameters were frozen or unfrozen since forward": freeze_weight,
}


@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("told", CHANGES)
def test_a_change_since_forward_is_refused(told: str, style: str) -> None:
    _, planned = make(style)
    x = torch.randn(3, WIDTH)
    loss = planned(x).sum()
    CHANGES[told](planned, x)
    segment = "segment_1" if style == "graph" else "first"
    with pytest.raises(fxmem.UsageError) as caught:
        loss.backward()
    assert caught.match(f"^{segment} of the plan cannot be recomputed in backward: {told}")
    planned.requires_grad_()
    planned(torch.randn(3, WIDTH)).sum().backward()


def take_steps(model: nn.Module, change: Callable[[nn.Module], object]) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(3, WIDTH)).square().sum()
        change(model)
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.parameters(), *model.buffers()]


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_another_call_may_count_statistics_before_backward(style: str) -> None:
    expected, found = (
        take_steps(model, lambda net: net(torch.ones(4, WIDTH))) for model in make(style)
    )
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))

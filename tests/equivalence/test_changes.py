"""What a segment reads, changed in place between forward and backward: refused where it matters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.planning.plan import Plan, Segment

WIDTH = 8


class Block(nn.Module):
    """Reads a weight that nobody saves, a buffer, and a weight of a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))
        self.constant = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.linear(x)) + self.table + self.constant)
        return torch.sin(y) * self.scale + self.shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def make(style: str) -> tuple[Net, nn.Module]:
    """A model, and one with a plan that computes its block again."""
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


@pytest.fixture(params=["graph", "modules"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def step_block(model: Any) -> None:
    torch.optim.SGD(model.first.parameters()).step()


def step_bias(model: Any) -> None:
    with torch.no_grad():
        model.first.linear.bias.add_(1)


def change_constant(model: Any) -> None:
    model.first.constant.add_(1)


def change_buffer(model: Any) -> None:
    model.first.table.add_(1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (step_block, "first.linear.weight"),
        (step_bias, "first.linear.bias"),
        (change_buffer, "first.table"),
        (change_constant, "first.constant"),
    ],
)
def test_what_is_read_again_is_refused(
    style: str, change: Callable[[nn.Module], None], name: str
) -> None:
    _, planned = make(style)
    for parameter in planned.parameters():
        parameter.grad = torch.ones_like(parameter)
    loss = planned(torch.randn(3, WIDTH)).sum()
    change(planned)
    with pytest.raises(fxmem.UsageError) as caught:
        loss.backward()
    segment = "segment_1" if style == "graph" else "first"
    assert str(caught.value) == (
        f"{name} was changed in place between forward and backward, and {segment} of the plan"
        " would be computed again from what it is now: gradients would not be the model's"
        " (step the optimizer after backward, or train without the plan)"
    )
    planned(torch.randn(3, WIDTH)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*", "ignore::DeprecationWarning")
def test_in_a_compiled_model_too(style: str) -> None:
    torch.compiler.reset()
    _, planned = make(style)
    loss = torch.compile(planned, backend="aot_eager")(torch.randn(3, WIDTH)).sum()
    change_buffer(planned)
    with pytest.raises(fxmem.UsageError, match=r"^first\.table was changed in place"):
        loss.backward()


def test_a_changed_input_is_what_pytorch_refuses(style: str) -> None:
    _, planned = make(style)
    x = torch.randn(3, WIDTH)
    loss = planned(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def take_steps(model: nn.Module, change: Callable[[nn.Module], Any] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(3, WIDTH)).square().sum()
        if change is not None:
            change(model)
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.parameters(), *model.buffers()]


def check_same(model: nn.Module, planned: nn.Module, **options: Any) -> None:
    expected, found = take_steps(model, **options), take_steps(planned, **options)
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))


def test_what_is_not_read_again_may_change(style: str) -> None:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.first.shift.add_(1)
            model.last.bias.add_(1)

    check_same(*make(style), change=change)


def test_what_is_read_may_be_frozen_between_forward_and_backward(style: str) -> None:
    def change(model: Any) -> None:
        model.first.linear.weight.requires_grad_(False)
        model.first.scale.requires_grad_(False)

    model, planned = make(style)
    check_same(model, planned, change=change)
    assert [p.requires_grad for p in planned.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


def test_optimizers_may_step_in_backward(style: str) -> None:
    pair = make(style)
    for model in pair:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step())
    check_same(*pair)


def test_statistics_may_be_counted_on(style: str) -> None:
    def change(model: nn.Module) -> None:
        model(torch.ones(4, WIDTH))

    check_same(*make(style), change=change)


def test_statistics_that_are_read_may_not_change(style: str) -> None:
    model, planned = make(style)
    for net in (model, planned):
        net.first.norm.eval()
        loss = net(torch.randn(3, WIDTH)).sum()
        net.first.norm.running_var.add_(1)
        with pytest.raises((RuntimeError, fxmem.UsageError), match=r"in ?place"):
            loss.backward()


class Listing(nn.Module):
    """A block that takes a list."""

    class Block(nn.Module):
        def forward(self, values: list[Tensor]) -> Tensor:
            return torch.sin(values[0] * values[1]).exp()

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.block = nn.Linear(WIDTH, WIDTH), Listing.Block()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block([self.linear(x), self.table])


def test_what_a_list_holds_is_watched() -> None:
    segment = Segment("a", "b", 2, fqn="block")
    planned = fxmem.apply(Listing(), Plan("", 2, 1, segments=(segment,), style="modules"))
    loss = planned(torch.randn(3, WIDTH)).sum()
    planned.table.add_(1)
    with pytest.raises(fxmem.UsageError, match=r"^a tensor that it is given was changed in place"):
        loss.backward()

"""What a segment's modules hold is what it is computed again with, whatever was set since."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.applying.runtime import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.activation = nn.LeakyReLU(0.1)
        self.scale = 1.0
        self.mask = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x).sin() * self.mask).exp() * self.scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def set_slope(block: Any, value: float) -> None:
    block.activation.negative_slope = value


def set_scale(block: Any, value: float) -> None:
    block.scale = value


def set_mask(block: Any, value: float) -> None:
    block.mask = torch.full((8,), value)


def replace_layer(block: Any, value: float) -> None:
    block.layer = nn.Linear(8, 8)
    nn.init.constant_(block.layer.weight, value)


def replace_activation(block: Any, value: float) -> None:
    block.activation = nn.ELU(value)


CHANGES = [set_slope, set_scale, set_mask, replace_layer, replace_activation]


def train_twice(model: Any, x: Tensor, change: Callable[[Any, float], None]) -> list[Tensor]:
    """Two calls, something else set before each, and one backward."""
    torch.manual_seed(0)
    loss, parameters = torch.zeros(()), []
    for value in (0.1, 0.7):
        for block in model.blocks:
            change(block, value)
        parameters += [*model.parameters()]
        loss = loss + model(x).square().mean()
    return [*torch.autograd.grad(loss, [*dict.fromkeys(parameters)], allow_unused=True)]


@pytest.mark.filterwarnings("ignore::fxmem.FxmemWarning")
@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("change", CHANGES)
def test_each_call_is_computed_again_as_it_was(
    change: Callable[[Any, float], None], style: str
) -> None:
    model, x = Stack(), torch.randn(64, 8)
    plan = fxmem.pareto(fxmem.analyze(model, (x,), device="cpu"), style=style, time_limit_s=0.5)[-1]
    assert plan.segments
    planned = fxmem.apply(Stack(), plan)
    planned.load_state_dict(model.state_dict())
    expected, found = train_twice(model, x, change), train_twice(planned, x, change)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_what_was_set_since_is_there_afterwards() -> None:
    block, x = Block(), torch.randn(4, 8)
    y = checkpoint(block, x, reads={"block": block})
    set_slope(block, 0.5)
    set_mask(block, 3.0)
    mask = block.mask
    y.sum().backward()
    assert block.mask is mask
    assert block.activation.negative_slope == 0.5


class Keeps(nn.Module):
    """Has what it computed last, to be looked at, and sets something up in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        before = weakref.ref(self.last)
        self.last = x.detach().cos()
        self.seen.append(before())
        if not hasattr(self, "hook"):
            self.hook = self.register_forward_hook(lambda *_: None)
        return x.exp().sin()


def test_what_a_segment_sets_itself_stays() -> None:
    model, x = Keeps(), torch.randn(4, 8, requires_grad=True)
    y = checkpoint(model, x, reads={"model": model})
    assert model.seen == [None]  # nothing holds what was there
    hook = model.hook
    y.sum().backward()
    assert model.hook is hook
    assert len(model._forward_hooks) == 1


class Draws(nn.Module):
    def __init__(self, draw: Callable[[torch.Generator], float]) -> None:
        super().__init__()
        self.draw = draw
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.draw(self.generator)).exp().sin()


@pytest.mark.parametrize(
    "draw",
    [
        lambda _: random.random(),
        lambda _: np.random.rand(),
        lambda generator: float(torch.rand((), generator=generator)),
    ],
    ids=["Python", "NumPy", "its own generator"],
)
@pytest.mark.parametrize("is_random", [False, True])
def test_numbers_of_any_generator_are_drawn_again(
    draw: Callable[[torch.Generator], float], is_random: bool
) -> None:
    random.seed(1)
    np.random.seed(1)
    model, plain = Draws(draw), Draws(draw)
    x, y = (torch.linspace(0, 1, 8).requires_grad_() for _ in range(2))
    out = checkpoint(model, x, reads={"model": model}, random=is_random)
    later = draw(model.generator)
    out.sum().backward()
    random.seed(1)
    np.random.seed(1)
    plain(y).sum().backward()
    assert later == draw(plain.generator)
    assert draw(model.generator) != later
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, y.grad)

"""State that steps of a model change: saved, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxmem.verifying.running import keep_state, list_random_states, save_state


class Keeper(nn.Module):
    """Keeps state of all common kinds between its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.table = torch.zeros(2)
        self.expanded = torch.zeros(1).expand(3)  # which cannot be written to
        self.calls = 0
        self.cache: dict[str, Any] = {"k": torch.zeros(1)}
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + 1  # another tensor under the name
        self.table += 1
        self.calls += 1
        self.cache["k"] += 1
        return x * self.weight + torch.rand(2, generator=self.generator) + torch.rand(2)


def describe(keeper: Keeper) -> list[Any]:
    tensors = keeper.mean, keeper.table, keeper.cache["k"], keeper.weight
    return [keeper.calls, keeper.training, *(tensor.tolist() for tensor in tensors)]


def test_state_is_put_back() -> None:
    keeper = Keeper().eval()
    before, mean = describe(keeper), keeper.mean
    restore = save_state(keeper)
    first = keeper.train()(torch.ones(2))
    keeper.weight.data.fill_(7)
    with torch.no_grad():
        mean.fill_(5)
    assert describe(keeper) != before
    restore()
    assert describe(keeper) == before
    assert keeper.mean is mean
    assert torch.equal(keeper(torch.ones(2)), first)  # so are both generators


def test_all_random_numbers_are_put_back() -> None:
    restore = save_state()
    states = list_random_states()

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    first = draw()
    assert [*states] == ["torch", "python", "numpy"]
    assert draw() != first
    restore()
    assert str(list_random_states()) == str(states)
    assert draw() == first


def test_gradients_are_away_within_and_back_after() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    before = gradient.clone()
    with pytest.raises(RuntimeError, match="stop"), keep_state(layer):
        assert layer.weight.grad is None
        layer(torch.ones(1, 2)).sum().backward()
        raise RuntimeError("stop")
    assert layer.weight.grad is gradient
    assert torch.equal(gradient, before)

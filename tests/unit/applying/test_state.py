"""What a model's code keeps: saved, and put back."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxmem.applying.state import keep_state, list_random_states, save_state

GENERATOR = torch.Generator()
CALLS = [0]
COUNT = 0


class Slots:
    """What it holds is in slots, one of which is empty at first."""

    __slots__ = ("calls", "last")

    def __init__(self) -> None:
        self.calls = 0


class Keeper(nn.Module):
    """Keeps all kinds of things between its calls."""

    made = 0
    drawn: torch.Generator = torch.Generator()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.table = torch.zeros(2)
        self.calls = 0
        self.seen: list[int] = []
        self.last: deque[int] = deque([1])
        self.names = {"a"}
        self.slots = Slots()
        self.cache: dict[str, Any] = {"k": torch.zeros(1)}
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        CALLS[0] += 1
        type(self).made += 1
        self.mean = self.mean + 1  # another tensor under the name
        self.table += 1
        self.calls += 1
        self.seen.append(self.calls)
        self.last.append(self.calls)
        self.names.add("b")
        self.slots.calls += 1
        self.slots.last = x
        self.cache["v"] = x
        self.cache["k"] += 1
        noise = torch.rand(2, generator=self.generator) + torch.rand(2, generator=GENERATOR)
        return x * self.weight + noise + torch.rand(2, generator=self.drawn)


def describe(keeper: Keeper) -> list[Any]:
    kept = (keeper.calls, keeper.seen[:], [*keeper.last], keeper.names.copy(), [*keeper.cache])
    slots = keeper.slots.calls, hasattr(keeper.slots, "last")
    values = [t.tolist() for t in (keeper.mean, keeper.table, keeper.cache["k"], keeper.weight)]
    return [*kept, *slots, *values, COUNT, CALLS[0], Keeper.made, keeper.training]


def test_everything_is_put_back() -> None:
    keeper = Keeper().eval()
    before, mean = describe(keeper), keeper.mean
    restore = save_state([keeper])
    first = keeper.train()(torch.ones(2))
    keeper.weight.data.fill_(7)
    with torch.no_grad():
        mean.fill_(5)
    assert describe(keeper) != before
    restore()
    assert describe(keeper) == before
    assert keeper.mean is mean
    assert torch.equal(keeper(torch.ones(2)), first)  # so are the three generators


def test_a_tensor_whose_memory_was_exchanged_gets_its_shape_back() -> None:
    layer = nn.Linear(2, 2)
    restore = save_state([layer])
    before = layer.weight.detach().clone()
    layer.weight.data = torch.zeros(3, dtype=torch.float64)
    restore()
    assert torch.equal(layer.weight, before)


def test_what_did_not_change_is_not_written_to() -> None:
    table = torch.zeros(1).expand(3)  # which cannot be written to
    layer = nn.Linear(2, 2)
    layer.table = table
    version = layer.weight._version
    save_state([layer])()
    assert layer.weight._version == version


def test_all_random_numbers_are_put_back() -> None:
    restore = save_state([])
    states = list_random_states([])

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    first = draw()
    assert {"torch", "python", "numpy"} <= states.keys()
    assert draw() != first
    restore()
    assert str(list_random_states([])) == str(states)
    assert draw() == first


def test_gradients_are_away_within_and_back_after() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    before = gradient.clone()
    with pytest.raises(RuntimeError, match="stop"), keep_state([layer]):
        assert layer.weight.grad is None
        layer(torch.ones(1, 2)).sum().backward()
        raise RuntimeError("stop")
    assert layer.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_generators_have_states_of_their_own() -> None:
    keeper = Keeper()
    before = list_random_states([keeper])
    del before["numpy"], before["python"]
    keeper(torch.ones(2))
    after = list_random_states([keeper])
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {f"generator {n}" for n in (1, 2, 3)}


def test_ordered_dicts_are_put_back_with_their_order() -> None:
    layer = nn.Linear(2, 2)
    handle = layer.register_forward_hook(lambda *_: None)
    restore = save_state([layer])
    handle.remove()
    layer.register_forward_hook(lambda *_: None)
    restore()
    assert list(layer._forward_hooks.items()) == [(handle.id, layer._forward_hooks[handle.id])]
    layer(torch.ones(1, 2))

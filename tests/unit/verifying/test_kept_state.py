"""State that steps of a model change: saved, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxmem.verifying.running import keep_state, list_random_states


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
    keeper(torch.ones(2)).sum().backward()
    before, mean, gradient = describe(keeper), keeper.mean, keeper.weight.grad
    numbers = list_random_states()
    with pytest.raises(RuntimeError, match="stop"), keep_state(keeper):
        assert keeper.weight.grad is None
        first = keeper.train()(torch.ones(2))
        first.sum().backward()
        random.random(), np.random.rand()
        with torch.no_grad():
            keeper.weight.fill_(7)
            mean.fill_(5)
        assert describe(keeper) != before
        raise RuntimeError("stop")
    assert describe(keeper) == before
    assert keeper.mean is mean and keeper.weight.grad is gradient
    assert [*numbers] == ["torch", "python", "numpy"]
    assert str(list_random_states()) == str(numbers)
    assert torch.equal(keeper(torch.ones(2)), first)  # so is its own generator


class Capturing(nn.Sequential):
    """Installs hooks in its first forward and notes that it did, as transformers' models do."""

    captured = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "is_installed"):
            self.is_installed = True
            self[0].register_forward_hook(self.capture)
        return super().forward(x)  # type: ignore[no-any-return]

    def capture(self, *_: Any) -> None:
        self.captured += 1


def test_hooks_that_a_first_forward_installs_are_taken_out_with_its_note() -> None:
    model = Capturing(nn.Linear(2, 2))
    for _ in range(2):
        with keep_state(model):
            model(torch.ones(2)), model(torch.ones(2))
            assert model.captured == 2

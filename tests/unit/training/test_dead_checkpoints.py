"""Checkpoints with ``use_reentrant=True`` of which no input wants a gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Net(nn.Module):
    def __init__(self, reentrant: bool, frozen: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(not frozen)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        run: Any = functools.partial(self.body.__call__)
        x = checkpoint(run, x, use_reentrant=self.reentrant)
        result: Tensor = self.head(x)
        return result


def list_notes(net: nn.Module) -> list[str]:
    notes = fxmem.analyze(net, "4x8").setup.notes
    return [note for note in notes if note.startswith("No input of the checkpoint")]


def test_its_parameters_get_no_gradient() -> None:
    (note,) = list_notes(Net(reentrant=True))
    assert note.endswith(
        "wants a gradient: with use_reentrant=True its 4 parameters get none (use_reentrant=False)."
    )
    real = Net(reentrant=True)
    real(torch.ones(4, 8)).sum().backward()
    assert [p.grad is None for p in real.parameters()] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(("reentrant", "frozen"), [(False, False), (True, True)])
def test_others_are_not_told(reentrant: bool, frozen: bool) -> None:
    assert list_notes(Net(reentrant, frozen)) == []


def test_nor_is_one_in_an_evaluation() -> None:
    notes = fxmem.analyze(Net(reentrant=True), "4x8", mode="infer").setup.notes
    assert not any("No input of the checkpoint" in note for note in notes)

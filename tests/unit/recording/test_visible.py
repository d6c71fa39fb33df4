"""Until when the user's code holds what nodes returned."""

from __future__ import annotations

import pytest
import torch

from fxmem.recording.ledger import Ledger
from fxmem.recording.visible import VisibleTensors


@pytest.fixture
def ledger() -> Ledger:
    """In the middle of a step."""
    ledger = Ledger(torch.device("cpu"))
    ledger.begin()
    return ledger


def test_the_last_tensor_on_a_storage_lets_go_of_it(ledger: Ledger) -> None:
    visible = VisibleTensors(ledger)
    tensor = torch.zeros(4)
    again = tensor.detach()
    visible.watch(tensor, 7)
    visible.watch(again, 7)
    ledger.operation = 1
    del tensor
    assert (visible.held, visible.let_go) == ({7}, {7: 1})
    ledger.operation = 3
    del again
    assert (visible.held, visible.let_go) == (set(), {7: 3})


def test_what_goes_after_the_step_is_no_part_of_it(ledger: Ledger) -> None:
    visible = VisibleTensors(ledger)
    tensor = torch.zeros(4)
    visible.watch(tensor, 0)
    ledger.recording = False
    del tensor
    assert (visible.held, visible.let_go) == (set(), {})


def test_a_view_keeps_what_it_is_a_view_of(ledger: Ledger) -> None:
    visible = VisibleTensors(ledger)
    tensor, other = torch.zeros(4, requires_grad=True).exp(), torch.zeros(4)
    visible.watch(tensor, 0)
    assert visible.is_visible(tensor)
    assert visible.is_visible(tensor[1:])
    assert not visible.is_visible(other)

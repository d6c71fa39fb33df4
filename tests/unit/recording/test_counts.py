"""Counts of truth values that code reads as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn

import fxmem


def test_a_count_is_the_most_that_it_may_be_until_code_branches_on_it() -> None:
    def divide(net: Any, x: Tensor) -> Tensor:
        kept = (x != -100).sum().item()
        return net.weight.sum() / kept + x.new_zeros(kept).sum()

    model = Runs(divide, weight=nn.Parameter(torch.ones(4, 4)))
    analysis = fxmem.analyze(model, ("8:int64",), device="cpu")
    assert any(s.shape == (8,) and s.born >= 0 for s in analysis.graph.storages)
    (note,) = [note for note in analysis.setup.notes if "count" in note]
    assert "test_counts.py" in note and note.endswith("is taken as 8, the most that it may be.")
    hinted = fxmem.analyze(model, ("8:int64",), device="cpu", size_hint=3)
    assert any(storage.shape == (3,) for storage in hinted.graph.storages)

    for ask in (lambda kept: kept > 3, bool, lambda kept: kept / 8 >= 0.5):

        def branch(net: Any, x: Tensor, ask: Any = ask) -> Tensor:
            return net.weight.sum() * (2 if ask((x != -100).sum().item()) else 1)

        with pytest.raises(fxmem.DataDependentError, match="test_counts"):
            fxmem.analyze(Runs(branch, weight=model.weight), ("8:int64",), device="cpu")

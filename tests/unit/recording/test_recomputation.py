"""Recomputed operations of checkpoints are told from those of backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.graph import Phase


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return checkpoint(
            lambda y: torch.sigmoid(self.second(y)), y, use_reentrant=self.use_reentrant
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_computes_again(use_reentrant: bool) -> None:
    analysis = fxmem.analyze(Checkpointed(use_reentrant), ("4x8",), optimizer="adam", device="cpu")
    recomputed = [o for o in analysis.graph.operations if o.recomputed]
    assert {o.phase for o in recomputed} == {Phase.BACKWARD}
    assert [o.name for o in recomputed if "detach" not in o.name] == [
        "aten.t.default",
        "aten.addmm.default",
        "aten.sigmoid.default",
    ]


def test_without_a_checkpoint_nothing_is_computed_again() -> None:
    analysis = fxmem.analyze(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), ("4x8",), device="cpu")
    assert not any(o.recomputed for o in analysis.graph.operations)

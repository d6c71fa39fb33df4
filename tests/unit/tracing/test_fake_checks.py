"""Code that looks for fake tensors takes the way of a run where their values are known."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fxmem


def is_fake_tensor(x: object) -> bool:
    return isinstance(x, FakeTensor)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """As ``transformers.utils.import_utils``, which asks before it looks into a mask."""
    module = types.ModuleType("transformers.utils.import_utils")
    module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Masked(nn.Module):
    def __init__(self, library: types.ModuleType) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.library = library

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.library.is_fake_tensor(mask) and (mask == 1).all():
            return y
        return torch.tanh(y) * mask


@pytest.mark.parametrize("mask, is_masked", [(torch.ones(3, 4), False), ("3x4:int64", True)])
def test_a_mask_that_is_given_is_looked_into(
    library: types.ModuleType, mask: Tensor | str, is_masked: bool
) -> None:
    mask = mask.long() if isinstance(mask, Tensor) else mask
    analysis = fxmem.analyze(Masked(library), ("3x4", mask), device="cpu")
    assert any(node.target == "tanh" for node in analysis.nodes) is is_masked
    assert library.is_fake_tensor is is_fake_tensor

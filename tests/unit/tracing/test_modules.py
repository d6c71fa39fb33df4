"""Modules with parametrized weights: blocks of the user's are entered, PyTorch's are leaves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fxmem
from fxmem.tracing.modules import is_leaf


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Block(nn.Module):
    """Has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)
        parametrize.register_parametrization(self, "weight", Doubled())
        parametrizations.weight_norm(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x @ self.weight)


def test_a_parametrized_module_is_a_leaf_where_its_class_is_pytorch_s() -> None:
    block = Block()
    assert not is_leaf(block) and is_leaf(block.linear)
    analysis = fxmem.analyze(nn.Sequential(block), ("3x8",), device="cpu")
    names = {node.name for node in analysis.nodes}
    assert names > {"0.linear", "0.parametrizations.weight"}

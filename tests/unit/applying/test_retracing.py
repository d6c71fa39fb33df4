"""Graphs are the same where each node is, and each number that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.applying.retracing import is_graph_of


class Scaled(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("scale", [1, True, 1.0, 0.0, -0.0, float("nan")], ids=repr)
def test_numbers_of_another_type_or_sign_are_another_graph(scale: Any) -> None:
    x = torch.randn(3, 4)
    graph: Any = fxmem.analyze(Scaled(scale), (x,), device="cpu").fx_graph
    same = [
        other
        for other in (1, True, 1.0, 0.0, -0.0, float("nan"))
        if is_graph_of(graph, Scaled(other), (x,), {}, "train")
    ]
    assert repr(same) == repr([scale])

"""What FakeTensorMode computes with known scalars stays on the GPU."""

from __future__ import annotations

import torch
from torch import nn

from fxmem import analyze


def test_a_scalar_computed_from_a_known_one_on_the_gpu_is_counted() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copied = self.steps.clone()
            on_host = self.steps.to("cpu")
            return self.linear(x) * (copied + on_host)

    graph = analyze(Counts(), ("3x3",), device="cuda").graph
    made = [
        graph.nodes[s.node].name for s in graph.storages if s.node is not None and s.nbytes == 8
    ]
    assert made == ["clone", "add"]

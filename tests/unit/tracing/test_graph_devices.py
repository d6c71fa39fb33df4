"""Devices that the code asks a tensor for: the graph runs wherever its inputs are."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxmem import analyze


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[0], device=x.device)
        return self.linear(x) * steps[:, None] + torch.zeros((), device="cpu")


def test_a_graph_traced_for_a_gpu_runs_on_the_cpu() -> None:
    model = Positions()
    analysis = analyze(model, ("3x4",), device="cuda")
    assert analysis.frontend == "fx"
    module = fx.GraphModule(model, analysis.fx_graph)
    x = torch.randn(3, 4)
    assert torch.equal(module(x), model(x))
    assert "cuda" not in module.code
    # Beside the input that it is of, so that no run of nodes is cut in two by it.
    assert [node.name for node in module.graph.nodes][:2] == ["x", "getattr_1"]
    assert "device = 'cpu'" in module.code, "what the code says itself stays"

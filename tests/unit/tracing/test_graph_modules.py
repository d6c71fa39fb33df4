"""Modules of torch.fx: each has a class of its own, and a graph that is no part of the step."""

from __future__ import annotations

from torch import fx, nn

from fxmem import analyze


def test_a_graph_module_keeps_its_forward_and_counts_its_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    analysis = analyze(fx.symbolic_trace(model), ("4x8",), device="cpu")
    assert analysis.parameter_bytes == 4 * (8 * 8 + 8 + 8 * 2 + 2)
    assert analysis.peak_bytes == analyze(model, ("4x8",), device="cpu").peak_bytes
    assert [node.name for node in analysis.nodes[:4]] == ["input", "0", "1", "2"]

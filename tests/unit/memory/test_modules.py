from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hand_made import MIB, make_analysis, make_graph, memory_graphs
from hypothesis import given
from torch import nn

import fxmem
from fxmem.graph import Category, MemoryGraph
from fxmem.memory.module_tree import Module, build_modules


def make_modules(graph: MemoryGraph | None = None) -> dict[str, Module]:
    graph = graph or make_graph()
    nodes = (replace(n, fqn=n.name) if n.target == "Linear" else n for n in graph.nodes)
    analysis = make_analysis(replace(graph, nodes=tuple(nodes)))
    return {module.fqn: module for module in analysis.modules.walk()}


class TestHandMade:
    def test_each_byte_at_the_peak_belongs_to_a_module(self) -> None:
        live = {fqn: module.live_bytes for fqn, module in make_modules().items()}
        assert live[""] == make_analysis().peak_bytes == 30 * MIB + 4  # of the loss
        # Its parameter 4, its state 2 and its output 1, and its gradient 4; no buffer "norm" ran.
        assert live["fc2"] == 11 * MIB
        assert live["block"] == 12 * MIB  # what is saved, the gradient, and the workspace
        assert live["fc1"] == 4 * MIB

    def test_parameters_flops_and_the_loss(self) -> None:
        modules = make_modules()
        assert [*modules] == ["", "fc1", "block", "fc2"]
        assert [m.parameters for m in modules.values()] == [2 * MIB, MIB, 0, MIB]
        assert (modules[""].forward_flops, modules["fc2"].backward_flops) == (4_000_000,) * 2
        assert modules[""].output_bytes == 9 * MIB + 4  # with the loss
        assert (modules["fc1"].class_name, modules["fc1"].shape) == ("Linear", (8, 1024))

    def test_a_parameter_of_a_module_that_did_not_run_is_the_models(self) -> None:
        graph = make_graph()
        renamed = replace(graph.storages[0], name="head.weight")
        graph = replace(graph, storages=(renamed, *graph.storages[1:]))
        model = make_modules(graph)[""]
        assert model.parameters == 2 * MIB
        assert sum(child.parameters for child in model.children) == MIB

    @given(memory_graphs())
    def test_the_model_has_all_that_is_alive_at_the_peak(self, graph: MemoryGraph) -> None:
        analysis = make_analysis(graph)
        model = build_modules(analysis.graph, analysis.peak)
        assert model.live_bytes == analysis.peak_bytes
        held = [s.nbytes for s in graph.storages if s.category is Category.PARAMETER]
        assert model.parameter_bytes == sum(held)


class Tied(nn.Module):
    """A list of equal blocks, of which one runs twice, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.out(self.lstm(x)[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("frontend", ["fx", "record"])
def test_the_sums_of_a_model_are_those_of_the_analysis(device: str, frontend: str) -> None:
    model = Tied()
    options = {"device": device, "frontend": frontend, "optimizer": "adam", "dtype": "bf16"}
    analysis = fxmem.analyze(model, "4x8:int64", **options)
    modules = {module.fqn: module for module in analysis.modules.walk()}
    whole = modules[""]
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    assert modules["lstm"].parameters == sum(p.numel() for p in model.lstm.parameters())
    assert whole.parameter_bytes == analysis.parameter_bytes
    assert whole.live_bytes == analysis.peak_bytes
    flops = (analysis.forward_flops, analysis.backward_flops)
    assert (whole.forward_flops, whole.backward_flops) == flops
    assert modules["blocks.0"].forward_flops == 2 * modules["blocks.1"].forward_flops > 0
    assert (modules["blocks.1"].class_name, modules["blocks.1"].shape) == ("Sequential", (4, 8, 16))
    assert (modules["lstm"].class_name, modules["blocks"].class_name) == ("LSTM", "")

"""Memory of the nodes of a graph of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.graph_drawer import FxGraphDrawer
from torch.fx.passes.split_module import split_module

import fxmem
from fxmem.passes import MemoryProp, NodeMemory


class Block(nn.Module):
    """A residual block with an in-place activation and a function that makes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.conv(x)))
        left, right = y.chunk(2, dim=1)
        return torch.cat([left * right, left], dim=1) + x


@pytest.fixture
def graph_module() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(Block(), Block()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_graph_s_step_is_that_of_its_module(graph_module: fx.GraphModule, device: str) -> None:
    options = {"device": device, "optimizer": "adam"}
    analysis = MemoryProp(graph_module, **options).propagate("4x8x16x16")
    expected = fxmem.analyze(graph_module, ("4x8x16x16",), **options)
    assert analysis.peak_bytes == expected.peak_bytes
    assert analysis.saved_bytes == expected.saved_bytes


def test_nodes_sum_to_the_step(graph_module: fx.GraphModule) -> None:
    analysis = MemoryProp(graph_module, device="cpu").propagate("4x8x16x16")
    memory: dict[str, NodeMemory] = {
        node.name: node.meta["fxmem"] for node in graph_module.graph.nodes
    }
    assert sum(found.saved_bytes for found in memory.values()) == analysis.saved_bytes
    assert sum(found.is_peak for found in memory.values()) == 1
    assert memory["_0_conv"].output_bytes == 4 * 8 * 16 * 16 * 4
    assert memory["relu_"].output_bytes == memory["chunk"].output_bytes == 0
    forward = {node.index for node in analysis.nodes if node.phase is fxmem.Phase.FORWARD}
    expected = sum(storage.nbytes for storage in analysis.peak.live if storage.node in forward)
    assert sum(found.live_at_peak_bytes for found in memory.values()) == expected


def test_an_annotated_graph_is_a_graph_to_torch_fx(graph_module: fx.GraphModule) -> None:
    MemoryProp(graph_module, device="cpu").propagate("4x8x16x16")
    x = torch.randn(4, 8, 16, 16)
    with torch.no_grad():
        graph_module.eval()
        expected = graph_module(x)
        assert torch.equal(fx.Interpreter(graph_module).run(x), expected)
        peak = next(n for n in graph_module.graph.nodes if n.meta["fxmem"].is_peak)
        names = [node.name for node in graph_module.graph.nodes]
        split = split_module(
            graph_module,
            graph_module,
            lambda node: int(names.index(node.name) > names.index(peak.name)),
        )
        assert torch.equal(split(x), expected)
    drawn = FxGraphDrawer(graph_module, "step").get_dot_graph()
    assert {node.get_name() for node in drawn.get_nodes()} >= {*names}

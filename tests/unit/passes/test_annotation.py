"""``analysis.graph_module``: a graph that runs, with the metadata of fx users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import Call
from torch import Tensor, fx, nn

import fxmem


class Net(nn.Module):
    """A function, a module in a module, an argument by name that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor) -> Tensor:
        return torch.sigmoid(self.body(x)) * scale + bias


ARGS, KWARGS = ("2x3x8x8", 0.5), {"bias": "6x6"}


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {}, {"autocast": "bf16"}, {"dtype": "bf16", "mode": "infer"}],
    ids=str,
)
def test_nodes_have_the_shapes_and_dtypes_of_the_step(options: dict[str, Any]) -> None:
    analysis = fxmem.analyze(Net(), ARGS, KWARGS, **options)
    nodes = {node.name: node for node in analysis.nodes}
    seen = 0
    for node in analysis.graph_module.graph.nodes:
        traced = nodes.get(node.meta.get("fxmem_node", node.name))
        if traced is not None and traced.shape is not None:
            tensor = node.meta["tensor_meta"]
            assert (tuple(tensor.shape), str(tensor.dtype)) == (
                traced.shape,
                f"torch.{traced.dtype}",
            )
            assert node.meta["val"].shape == tensor.shape
            seen += 1
    assert seen >= 6


def test_the_graph_runs_as_the_model_does() -> None:
    model = Net().eval()
    graph_module = fxmem.analyze(model, ARGS, KWARGS, mode="infer").graph_module
    x, bias = torch.randn(2, 3, 8, 8), torch.randn(6, 6)
    expected = model(x, 0.5, bias=bias)
    assert torch.equal(graph_module.eval()(x, 0.5, bias), expected)
    assert torch.equal(fx.Interpreter(graph_module).run(x, 0.5, bias), expected)
    assert graph_module.get_parameter("body.0.weight") is model.body[0].weight


def test_nodes_tell_module_line_and_memory() -> None:
    analysis = fxmem.analyze(Net(), ARGS, KWARGS, device="cpu")
    nodes = {node.name: node for node in analysis.graph_module.graph.nodes}
    norm = nodes["body_1"].meta
    assert norm["nn_module_stack"] == {
        "": ("", Net),
        "body": ("body", nn.Sequential),
        "body.1": ("body.1", nn.BatchNorm2d),
    }
    assert "torch.sigmoid(self.body(x))" in norm["stack_trace"]
    assert norm["fxmem"].output_bytes == 2 * 4 * 6 * 6 * 4
    assert [node.name for node in nodes.values() if node.meta["fxmem"].is_peak] == [
        analysis.peak.node.name.replace(".", "_") if analysis.peak.node else None
    ]


def test_a_model_that_only_record_traces_has_none() -> None:
    analysis = fxmem.analyze(Call(lambda x: {object(): x * 2}), ("4x4",), mode="infer")
    assert analysis.graph_module is None
    assert analysis.setup.frontend_reason

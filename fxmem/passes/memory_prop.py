"""Memory propagation through a graph, beside ``torch.fx.passes.shape_prop.ShapeProp``."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.tracing.fxgraph import NODE
from fxmem.training.annotation import META, NodeMemory, measure_nodes


class MemoryProp:
    """Analyses a step of a graph module, and puts the memory of each node into its ``meta``.

    Args:
        graph_module: The graph; left as it is, apart from ``node.meta["fxmem"]``.
        **options: As of :func:`fxmem.analyze`: ``mode``, ``device``, ``optimizer``, ``loss``, ...

    >>> graph_module = fx.symbolic_trace(nn.Sequential(nn.Linear(256, 512), nn.ReLU()))
    >>> analysis = MemoryProp(graph_module, device="cpu").propagate("64x256")
    >>> [(node.name, node.meta["fxmem"].saved_bytes) for node in graph_module.graph.nodes]
    [('input_1', 0), ('_0', 0), ('_1', 131072), ('output', 0)]
    """

    def __init__(self, graph_module: fx.GraphModule, **options: Any) -> None:
        self.graph_module = graph_module
        self.options = options

    def propagate(self, *args: Any) -> Analysis:
        """Analyses the step with these inputs, and annotates the nodes.

        Args:
            *args: Inputs in the order of the placeholders: tensors, :class:`fxmem.TensorSpec` or
                texts such as ``"8x3x224x224:bf16"``.

        Returns:
            The analysis that the annotations are taken from.

        Raises:
            FxmemError: As :func:`fxmem.analyze` does.
        """
        analysis = analyze(_Interpreted(self.graph_module), args, **self.options)
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        traced = analysis.fx_graph.find_nodes(op="placeholder")
        origins = {mine.name: node.name for mine, node in zip(traced, placeholders, strict=False)}
        for mine in analysis.fx_graph.nodes:
            if NODE in mine.meta and "from_node" in mine.meta:
                origins[mine.meta[NODE]] = mine.meta["from_node"][-1].name
        memory = measure_nodes(analysis, origins)
        for node in self.graph_module.graph.nodes:
            node.meta[META] = memory.get(node.name, NodeMemory())
        return analysis


class _Interpreted(nn.Module):
    """A graph module run node by node, which names the node of each call."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        graph = copy.deepcopy(graph_module.graph)
        for node in graph.nodes:
            node.meta = {"name": node.name}  # without any, Interpreter does not say which runs
        self.graph_module = fx.GraphModule(graph_module, graph)

    def forward(self, *args: Any) -> Any:
        """Runs the graph; as in its generated code, values are freed after their last use."""
        with traceback.preserve_node_meta():
            return fx.Interpreter(self.graph_module).run(*args)

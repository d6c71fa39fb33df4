"""Memory propagation through a graph, beside ``torch.fx.passes.shape_prop.ShapeProp``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.tracing.fxgraph import NODE

META = "fxmem"
"""The key in ``node.meta`` of a node's :class:`NodeMemory`."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of one node of a graph in a step.

    Attributes:
        output_bytes: New storages in its result; a view or an in-place result counts 0.
        saved_bytes: Storages that it was the first to save for backward; parameters, buffers and
            inputs are not counted.
        transient_bytes: How far its forward rises above the results that it leaves.
        live_at_peak_bytes: Storages alive at the peak of the step that it made, in forward or in
            its backward.
        is_peak: Whether the step peaks in its forward or in its backward.
        segments: Segments of a plan that recompute it, outermost first, by their names in the code
            of the graph; set by :class:`fxmem.passes.CheckpointPass`.
        is_inplace: Whether a plan has it overwrite its input; set by
            :class:`fxmem.passes.InplacePass`.
    """

    output_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    live_at_peak_bytes: int = 0
    is_peak: bool = False
    segments: tuple[str, ...] = ()
    is_inplace: bool = False


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
        analysis = analyze_model(_Interpreted(self.graph_module), args, **self.options)
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


def measure_nodes(analysis: Analysis, origins: Mapping[str, str]) -> dict[str, NodeMemory]:
    """Sums the memory of an analysis's nodes over the nodes of a graph.

    Args:
        analysis: The analysis.
        origins: By name of a node of the analysis, the node of the graph that it belongs to.

    Returns:
        By name of a node of the graph, its memory; without nodes that made nothing.
    """
    peak = analysis.peak
    live_bytes = Counter[int | None]()
    for storage in peak.live:
        live_bytes[storage.node] += storage.nbytes
    memory: dict[str, NodeMemory] = {}
    for node in analysis.nodes:
        if node.name in origins:
            before = memory.get(origins[node.name], NodeMemory())
            memory[origins[node.name]] = NodeMemory(
                before.output_bytes + node.output_bytes,
                before.saved_bytes + node.saved_bytes,
                max(before.transient_bytes, node.transient_bytes),
                before.live_at_peak_bytes + live_bytes[node.index],
                before.is_peak or (peak.node is not None and peak.node.index == node.index),
            )
    return memory


class _Interpreted(nn.Module):
    """A graph module run node by node, which tells of each call the node that makes it."""

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

"""The traced graph of an analysis as a ``torch.fx.GraphModule`` with the metadata of fx users."""

from __future__ import annotations

import copy
import linecache
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from fxmem.graph import SourceLocation
from fxmem.kernels.cpu import CPU
from fxmem.loading.target import silence_fake_kernels
from fxmem.patching import hold_process
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.conditions import leave_autocast
from fxmem.tracing.fxgraph import NODE

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.training.blueprint import Blueprint


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


def make_graph_module(analysis: Analysis) -> fx.GraphModule | None:
    """Makes a module of the traced graph, with the parameters and submodules of the model.

    Its nodes have the ``meta`` that passes of torch.fx read: ``val``, ``tensor_meta``,
    ``nn_module_stack`` and ``stack_trace``; and ``meta["fxmem"]``, a
    :class:`~fxmem.passes.NodeMemory`.

    Args:
        analysis: An analysis that was made in this process.

    Returns:
        A graph module that runs as the model's forward does; None where the model was recorded
        without one (``analysis.setup.frontend_reason`` says why), or is gone.
    """
    if analysis.frontend != "fx":
        return None
    graph, model = copy.deepcopy(analysis.fx_graph), analysis.blueprint.model
    _propagate_fakes(analysis.blueprint, graph)
    graph_module = fx.GraphModule(model, graph, type(model).__name__)
    memory = measure_nodes(analysis, {node.name: node.name for node in analysis.nodes})
    nodes = {node.name: node for node in analysis.nodes}
    for node in graph_module.graph.nodes:
        name = node.name if node.op == "placeholder" else node.meta.get(NODE, "")
        node.meta[META] = memory.get(name, NodeMemory())
        if "val" in node.meta:
            node.meta["tensor_meta"] = map_aggregate(node.meta["val"], _describe_tensor)
        if name in nodes:
            node.meta["nn_module_stack"] = dict(_list_modules(model, nodes[name].fqn))
            source = nodes[name].source
            if source is not None:
                node.meta["stack_trace"] = write_stack_trace(source)
    return graph_module


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


def _propagate_fakes(blueprint: Blueprint, graph: fx.Graph) -> None:
    """Runs the graph on fake tensors on the CPU, in the dtypes of the step."""
    on_cpu = replace(blueprint, options=replace(blueprint.options, target=CPU))
    dtype = blueprint.options.autocast_to
    with (
        hold_process(),
        torch.inference_mode(False),
        torch.enable_grad(),
        leave_autocast(),
        silence_fake_kernels(),
        blueprint.fake_mode,
        on_cpu.make_step() as step,
    ):
        inputs = [value for _, value in bind_arguments(step.model, step.args, step.kwargs)]
        propagation = FakeTensorProp(fx.GraphModule(step.model, graph), blueprint.fake_mode)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            propagation.propagate_dont_convert_inputs(*inputs)


def _describe_tensor(value: Any) -> Any:
    return _extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else value


def _list_modules(model: nn.Module, fqn: str) -> Iterator[tuple[str, tuple[str, type]]]:
    """Iterates over the modules around a call, outermost first, as ``torch.export`` names them."""
    atoms = fqn.split(".") if fqn else []
    for depth in range(len(atoms) + 1):
        path = ".".join(atoms[:depth])
        yield path, (path, type(model.get_submodule(path)))


def write_stack_trace(source: SourceLocation) -> str:
    """Writes the user's line as ``torch.fx`` does.

    >>> write_stack_trace(SourceLocation("net.py", 7, "forward"))
    'File "net.py", line 7, in forward'
    """
    trace = f'File "{source.file}", line {source.line}, in {source.function}'
    line = linecache.getline(source.file, source.line).strip()
    return f"{trace}\n    {line}" if line else trace

"""The traced graph of an analysis as a ``torch.fx.GraphModule`` with the metadata of fx users."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from fxmem.analysis import Analysis
from fxmem.analyzing import isolate_analysis
from fxmem.applying.codegen import SEEN, SEGMENTS, lay_changes
from fxmem.graph import SourceLocation
from fxmem.kernels.cpu import CPU
from fxmem.passes.memory_prop import META, NodeMemory, measure_nodes
from fxmem.planning.plan import InplaceChange, Segment
from fxmem.recording.blueprint import Blueprint
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.fxgraph import NODE


def make_graph_module(analysis: Analysis) -> fx.GraphModule | None:
    """Makes a module of the traced graph, with the parameters and submodules of the model.

    Its nodes have the ``meta`` that passes of torch.fx read: ``val``, ``tensor_meta``,
    ``nn_module_stack`` and ``stack_trace``; and ``meta["fxmem"]``, a
    :class:`~fxmem.passes.memory_prop.NodeMemory`.

    Args:
        analysis: An analysis that was made in this process.

    Returns:
        A graph module that runs as the model's forward does; None where the model was recorded
        without one (``analysis.setup.frontend_reason`` says why), or is gone.
    """
    if analysis.blueprint is None or analysis.frontend != "fx":
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


def lay_plan(
    graph_module: fx.GraphModule,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
) -> fx.GraphModule:
    """Lays changes of a plan over a copy of a graph, and notes them in ``meta["fxmem"]``."""
    made = lay_changes(graph_module, segments, inplace)
    for node in made.graph.nodes:
        node.meta[META] = replace(
            node.meta.get(META, NodeMemory()),
            segments=tuple(code.name for code in node.meta.get(SEGMENTS, ())),
            is_inplace=SEEN in node.meta,
        )
    return made


def _propagate_fakes(blueprint: Blueprint, graph: fx.Graph) -> None:
    """Runs the graph on fake tensors on the CPU, in the dtypes of the step."""
    on_cpu = replace(blueprint, options=replace(blueprint.options, target=CPU))
    dtype = blueprint.options.autocast_to
    with isolate_analysis(), blueprint.fake_mode, on_cpu.make_step() as step:
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

"""Segments laid over a traced graph, and the module that runs it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx, nn

from fxmem.planning.facts import StepFacts, is_batch_norm
from fxmem.planning.regions import Region
from fxmem.tracing.fxgraph import NODE
from fxmem.transform.codegen import SEGMENTS, SegmentCode, SegmentCodeGen


def build_module(
    model: nn.Module, graph: fx.Graph, facts: StepFacts, regions: Sequence[Region]
) -> fx.GraphModule:
    """The module that runs a traced graph with some regions under checkpoints.

    Args:
        model: Whose submodules, parameters and buffers the graph calls.
        graph: As it was traced.
        facts: Of the step it was traced in.
        regions: What is computed again.
    """
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, values)
    copied.output(output)
    originals = {copy: node for node, copy in values.items()}
    paths = _lay_paths(regions, facts)
    owners = _find_owners(graph)
    for copy, node in originals.items():
        owner = owners.get(node)
        copy.meta[SEGMENTS] = paths[owner] if owner is not None else ()
    copied.set_codegen(SegmentCodeGen())
    return fx.GraphModule(model, copied)


def _lay_paths(regions: Sequence[Region], facts: StepFacts) -> dict[int, tuple[SegmentCode, ...]]:
    paths: dict[int, tuple[SegmentCode, ...]] = dict.fromkeys(range(len(facts.graph.nodes)), ())

    def lay(regions: Sequence[Region], prefix: str) -> None:
        for number, region in enumerate(regions, 1):
            code = _describe(region, f"{prefix}_{number}", facts)
            for node in range(region.start, region.stop):
                paths[node] = (*paths[node], code)
            lay(region.children, code.name)

    lay(regions, "segment")
    return paths


def _describe(region: Region, name: str, facts: StepFacts) -> SegmentCode:
    graph = facts.graph
    operations = facts.list_operations(region.start, region.stop)
    norms = dict.fromkeys(
        graph.nodes[o.node].fqn for o in operations if o.node is not None and is_batch_norm(o)
    )
    return SegmentCode(name, any(o.effect is not None for o in operations), tuple(norms))


def _find_owners(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node of the FX graph, the traced node that it is part of.

    What takes a result apart belongs to what made it; what computes sizes to what uses them.
    """
    owners: dict[fx.Node, int] = {}
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if NODE in node.meta:
            owners[node] = node.meta[NODE]
            owners.update(dict.fromkeys(waiting, owners[node]))
            waiting.clear()
        elif node.target in (operator.getitem, getattr, "size") and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if source in owners:
                owners[node] = owners[source]
        elif node.op not in ("placeholder", "output", "get_attr"):
            waiting.append(node)
    return owners

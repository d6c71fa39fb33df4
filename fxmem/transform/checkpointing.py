"""Segments laid over a traced graph, and the module that runs it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx, nn

from fxmem.errors import UsageError
from fxmem.planning.plan import Segment
from fxmem.tracing.fxgraph import NODE
from fxmem.transform.codegen import SEGMENTS, SegmentCode
from fxmem.transform.module import PlannedModule

_PARTS = (operator.getitem, getattr, "size")
"""What takes a result apart."""


def build_module(model: nn.Module, graph: fx.Graph, segments: Sequence[Segment]) -> PlannedModule:
    """The module that runs a traced graph with some segments under checkpoints.

    Args:
        model: Whose submodules, parameters and buffers the graph calls.
        graph: As it was traced.
        segments: What is computed again.

    Raises:
        UsageError: A segment names a node that the graph lacks.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph, copies))
    owners = _find_owners(graph)
    paths = _lay_paths(segments, [*dict.fromkeys(owners.values())], _find_prefix(graph))
    for node, copy in copies.items():
        copy.meta[SEGMENTS] = paths.get(owners.get(node, ""), ())
    return PlannedModule(model, copied)


def _lay_paths(
    segments: Sequence[Segment], names: Sequence[str], prefix: str
) -> dict[str, tuple[SegmentCode, ...]]:
    """By name of a node, the segments it lies in, outermost first."""
    positions = {name: at for at, name in enumerate(names)}
    paths: dict[str, tuple[SegmentCode, ...]] = {}
    for segment, code in _iterate_codes(segments, prefix):
        for name in (segment.first, segment.last):
            if name not in positions:
                raise UsageError(
                    f"the plan's node {name!r} is not in the model",
                    hint="make the plan for this model and these inputs",
                )
        for at in range(positions[segment.first], positions[segment.last] + 1):
            paths[names[at]] = (*paths.get(names[at], ()), code)
    return paths


def _find_prefix(graph: fx.Graph) -> str:
    """What names of segments begin with, and no value's does."""
    prefix = "segment"
    while any(node.name.startswith(f"{prefix}_") for node in graph.nodes):
        prefix = f"planned_{prefix}"
    return prefix


def _iterate_codes(
    segments: Sequence[Segment], prefix: str
) -> Iterator[tuple[Segment, SegmentCode]]:
    for number, segment in enumerate(segments, 1):
        code = SegmentCode(f"{prefix}_{number}", segment.random, segment.norms)
        yield segment, code
        yield from _iterate_codes(segment.children, code.name)


def _find_owners(graph: fx.Graph) -> dict[fx.Node, str]:
    """By node of the FX graph, the traced node that it is part of.

    What takes a result apart belongs to what made it; what computes sizes to what uses them.
    """
    owners: dict[fx.Node, str] = {}
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if NODE in node.meta:
            owners[node] = node.meta[NODE]
            owners.update(dict.fromkeys(waiting, owners[node]))
            waiting.clear()
        elif node.target in _PARTS and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if source in owners:
                owners[node] = owners[source]
        elif node.op not in ("placeholder", "output", "get_attr"):
            waiting.append(node)
    return owners

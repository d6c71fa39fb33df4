"""Segments and in-place overwriting laid over a traced graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx, nn

from fxmem.applying.codegen import (
    OVERWRITE,
    SEGMENTS,
    OverwriteCode,
    SegmentCode,
    SegmentCodeGen,
)
from fxmem.applying.modules import find_holders
from fxmem.errors import UsageError
from fxmem.planning.inplace.fx_nodes import find_overwriting, find_owners
from fxmem.planning.plan import InplaceChange, Segment


def lay_changes(
    graph_module: fx.GraphModule,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
) -> fx.GraphModule:
    """Makes a module that runs a graph with segments under checkpoints and overwriting in place.

    Args:
        graph_module: With a graph as it was traced, ``Analysis.fx_graph``, or one that other
            changes were laid over.
        segments: What backward computes again.
        inplace: What is computed in place.

    Returns:
        Another module, with the parameters and submodules of the first.

    Raises:
        UsageError: A segment or a change names a node that the graph lacks.
    """
    graph = lay_over_graph(graph_module.graph, graph_module, segments, inplace)
    return fx.GraphModule(graph_module, graph, class_name=type(graph_module).__name__)


def lay_over_graph(
    graph: fx.Graph,
    model: nn.Module,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
) -> fx.Graph:
    """Copies a graph with segments and overwriting; see :func:`lay_changes`.

    Args:
        graph: As it was traced.
        model: Whose modules the graph calls.
        segments: What backward computes again.
        inplace: What is computed in place.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph, copies))
    for traced in graph.find_nodes(op="output"):
        output.meta.update(traced.meta)
    copied.set_codegen(SegmentCodeGen())
    owners = find_owners(graph)
    names = [*dict.fromkeys(owners.values())]
    for name in _list_named(segments, inplace):
        if name not in names:
            raise UsageError(
                f"the plan's node {name!r} is not in the model",
                hint="make the plan for this model and these inputs",
            )
    if segments:
        paths = _lay_paths(_iterate_codes(segments, _find_prefix(graph), model), names)
        for node, copy in copies.items():
            copy.meta[SEGMENTS] = paths.get(owners.get(node, ""), ())
    for found in find_overwriting(graph, inplace):
        maker = () if found.maker is None else (str(found.maker.target),)
        takers = tuple(dict.fromkeys(str(node.target) for node in found.consumers))
        code = OverwriteCode(found.form, found.is_second, maker, takers)
        copies[found.node].meta[OVERWRITE] = code
    return copied


def _list_named(segments: Iterable[Segment], inplace: Iterable[InplaceChange]) -> Iterator[str]:
    for segment in segments:
        yield from (segment.first, segment.last, *_list_named(segment.children, ()))
    for change in inplace:
        yield from (change.node, change.overwrites)


def _lay_paths(
    codes: Iterable[tuple[Segment, SegmentCode]], names: Sequence[str]
) -> dict[str, tuple[SegmentCode, ...]]:
    """By name of a node, the segments it lies in, outermost first."""
    positions = {name: at for at, name in enumerate(names)}
    paths: dict[str, tuple[SegmentCode, ...]] = {}
    for segment, code in codes:
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
    segments: Sequence[Segment], prefix: str, model: nn.Module
) -> Iterator[tuple[Segment, SegmentCode]]:
    for number, segment in enumerate(segments, 1):
        states = find_holders(model, segment.states)
        code = SegmentCode(f"{prefix}_{number}", segment.norms, states)
        yield segment, code
        yield from _iterate_codes(segment.children, code.name, model)

"""Segments and overwriting laid over a traced graph, and the module that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx, nn

from fxmem.applying.codegen import OVERWRITE, SEGMENTS, OverwriteCode, SegmentCode
from fxmem.applying.holders import find_holders
from fxmem.applying.module import PlannedModule
from fxmem.errors import UsageError
from fxmem.planning.inplace.fx_nodes import find_overwriting, find_owners
from fxmem.planning.plan import InplaceChange, Segment
from fxmem.tracing.fxgraph import NODE

_MISSING = "the plan's node {!r} is not in the model"
_MISSING_HINT = "make the plan for this model and these inputs"


def build_module(
    model: nn.Module,
    graph: fx.Graph,
    segments: Sequence[Segment],
    inplace: Sequence[InplaceChange] = (),
    *,
    mode: str = "train",
    size_hint: int | None = None,
) -> PlannedModule:
    """The module that runs a traced graph with some segments under checkpoints.

    Args:
        model: Whose submodules, parameters and buffers the graph calls.
        graph: As it was traced.
        segments: What is computed again.
        inplace: What is computed in place.
        mode: The calls that run the graph: those of training, or those of inference.
        size_hint: What was assumed of sizes that depend on data.

    Raises:
        UsageError: A segment or a change names a node that the graph lacks.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph, copies))
    for traced in graph.find_nodes(op="output"):
        output.meta.update(traced.meta)
    owners = find_owners(graph)
    codes = _iterate_codes(segments, _find_prefix(graph), model)
    paths = _lay_paths(codes, [*dict.fromkeys(owners.values())])
    for node, copy in copies.items():
        copy.meta[SEGMENTS] = paths.get(owners.get(node, ""), ())
    _check_names(graph, inplace)
    for found in find_overwriting(graph, inplace):
        maker = () if found.maker is None else (str(found.maker.target),)
        takers = tuple(dict.fromkeys(str(node.target) for node in found.consumers))
        copies[found.node].meta[OVERWRITE] = OverwriteCode(
            found.form, found.is_second, maker, takers
        )
    return PlannedModule(model, copied, mode, size_hint=size_hint)


def _check_names(graph: fx.Graph, changes: Iterable[InplaceChange]) -> None:
    names = {node.meta[NODE] for node in graph.nodes if NODE in node.meta}
    for change in changes:
        for name in (change.node, change.overwrites):
            if name not in names:
                raise UsageError(_MISSING.format(name), hint=_MISSING_HINT)


def _lay_paths(
    codes: Iterable[tuple[Segment, SegmentCode]], names: Sequence[str]
) -> dict[str, tuple[SegmentCode, ...]]:
    """By name of a node, the segments it lies in, outermost first."""
    positions = {name: at for at, name in enumerate(names)}
    paths: dict[str, tuple[SegmentCode, ...]] = {}
    for segment, code in codes:
        for name in (segment.first, segment.last):
            if name not in positions:
                raise UsageError(_MISSING.format(name), hint=_MISSING_HINT)
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
        states = tuple(find_holders(model, segment.states))
        code = SegmentCode(f"{prefix}_{number}", segment.random, segment.norms, states)
        yield segment, code
        yield from _iterate_codes(segment.children, code.name, model)

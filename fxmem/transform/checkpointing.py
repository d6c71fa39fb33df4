"""Segments and overwriting laid over a traced graph, and the module that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx, nn

from fxmem.errors import UsageError
from fxmem.planning.fx_nodes import find_owners, place_nodes
from fxmem.planning.inplace_forms import COMMUTATIVE, read_form
from fxmem.planning.plan import InplaceChange, Reorder, Segment
from fxmem.planning.reordering import move_names
from fxmem.tracing.fxgraph import NODE
from fxmem.transform.codegen import OVERWRITE, PLACE, SEGMENTS, OverwriteCode, SegmentCode
from fxmem.transform.holders import find_holders
from fxmem.transform.module import PlannedModule

_MISSING = "the plan's node {!r} is not in the model"
_MISSING_HINT = "make the plan for this model and these inputs"


def build_module(
    model: nn.Module,
    graph: fx.Graph,
    segments: Sequence[Segment],
    inplace: Sequence[InplaceChange] = (),
    reorders: Sequence[Reorder] = (),
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
        reorders: What runs earlier.
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
    for node, code in _find_overwriting(graph, owners, inplace):
        copies[node].meta[OVERWRITE] = code
    for node, place in _iterate_places(graph, reorders):
        copies.get(node, output).meta[PLACE] = place
    return PlannedModule(model, copied, mode, size_hint=size_hint)


def _iterate_places(graph: fx.Graph, reorders: Sequence[Reorder]) -> Iterator[tuple[fx.Node, int]]:
    """Where each node comes to stand, if any is moved."""
    names = [node.meta[NODE] for node in graph.nodes if NODE in node.meta]
    for reorder in reorders:
        for name in (reorder.first, reorder.last, reorder.before):
            if name not in names:
                raise UsageError(_MISSING.format(name), hint=_MISSING_HINT)
    if reorders:
        yield from place_nodes(graph, move_names(names, reorders)).items()


def _find_overwriting(
    graph: fx.Graph, owners: Mapping[fx.Node, str], changes: Iterable[InplaceChange]
) -> Iterator[tuple[fx.Node, OverwriteCode]]:
    """The nodes that run in place, and how."""
    by_name = {node.meta[NODE]: node for node in graph.nodes if NODE in node.meta}
    for change in changes:
        node = by_name.get(change.node)
        if node is None or change.overwrites not in by_name:
            missing = change.node if node is None else change.overwrites
            raise UsageError(_MISSING.format(missing), hint=_MISSING_HINT)
        form = read_form(change.call)
        taken = [n for n in node.all_input_nodes if owners.get(n) == change.overwrites]
        if len(taken) != 1:
            continue
        places = [*node.args, *node.kwargs.values()]
        is_second = len(places) > 1 and places[1] is taken[0]
        if is_second and form.name not in COMMUTATIVE:
            continue
        yield node, OverwriteCode(form, is_second, _find_watchers(node, taken[0]))


def _find_watchers(node: fx.Node, value: fx.Node) -> tuple[str, ...]:
    """The modules that take a value or made it, but for the one that overwrites it."""
    seen: dict[fx.Node, None] = {}
    while True:
        seen.update(dict.fromkeys((value, *value.users)))
        if value.op in ("call_module", "placeholder", "get_attr") or not value.all_input_nodes:
            break
        value = value.all_input_nodes[0]
    names = (str(n.target) for n in seen if n.op == "call_module" and n is not node)
    return tuple(dict.fromkeys(names))


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

"""The memory graph for networkx, and the content of its picture: clusters, boxes and edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import networkx

from fxmem.report.document import Document, NodeRow
from fxmem.report.graph.tree import (
    AIM_BOXES,
    AIM_PLAN_BOXES,
    Detail,
    Item,
    Kind,
    Leaf,
    Tree,
    cut_tree,
    fold_repeats,
    grow_tree,
    wrap_segments,
)

if TYPE_CHECKING:
    from fxmem.planning.plan import Plan, Segment


_FIELDS = (
    *("fqn", "op", "target", "shape", "dtype", "output_bytes", "saved_bytes", "transient_bytes"),
    *("forward_flops", "backward_flops"),
)


def build_digraph(document: Document) -> networkx.DiGraph[str]:
    """Builds the graph of a step's nodes, annotated with their memory.

    Nodes have the name of the traced node, in order of execution; an edge leads from a node to
    one that takes its result. The attributes are listed at :meth:`fxmem.Analysis.to_networkx`.

    All is plain data; sizes are in bytes, of storages as the allocator hands them out.
    """
    nodes, headline = document.nodes, document.headline
    graph = networkx.DiGraph(
        model=document.setup.model, peak_bytes=headline.peak_bytes, phase=headline.phase.value
    )
    for row in nodes:
        graph.add_node(
            row.name,
            phase=row.phase.value,
            source=None if row.source is None else f"{row.source.file}:{row.source.line}",
            live_at_peak_bytes=row.live_bytes,
            is_peak=row.name == headline.node,
            **{name: getattr(row, name) for name in _FIELDS},
        )
    for row in nodes:
        for tail in row.inputs:
            sizes = {index: document.storage_bytes[index] for index in nodes[tail].results}
            graph.add_edge(nodes[tail].name, row.name, storages=sizes, nbytes=sum(sizes.values()))
    return graph


@dataclass(frozen=True, slots=True)
class Overlay:
    """A plan on the nodes of a report."""

    # Name and nodes of each segment; one that lies within another comes after it.
    segments: tuple[tuple[str, range], ...] = ()
    again: frozenset[int] = frozenset()  # nodes that backward recomputes
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # other changes, by node
    peak_bytes: int = 0  # with the plan


NO_OVERLAY = Overlay()


def lay_plan(plan: Plan, nodes: Sequence[NodeRow]) -> Overlay:
    """Finds the nodes that a plan, made for them, recomputes or changes."""
    positions = {node.name: index for index, node in enumerate(nodes)}
    notes: dict[int, tuple[str, ...]] = {}
    changes = [(change.node, f"in place: {change.call}") for change in plan.inplace]
    changes += [(point.after, f"then del {point.variable or point.value}") for point in plan.dels]
    for name, note in changes:
        notes[positions[name]] = (*notes.get(positions[name], ()), note)

    def number(segments: Iterable[Segment], above: str = "") -> Iterator[tuple[str, range]]:
        for count, segment in enumerate(segments, 1):
            name = f"{above}{count}"
            yield name, range(positions[segment.first], positions[segment.last] + 1)
            yield from number(segment.children, f"{name}.")

    segments = tuple(number(plan.segments))
    again = frozenset(node for _, inside in segments for node in inside)
    return Overlay(segments, again, notes, plan.peak_bytes)


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or several that are shown as one."""

    key: str
    title: str  # its name within the cluster around it
    name: str  # its whole name, or the first and the last of several
    rows: tuple[tuple[NodeRow, ...], ...]  # of each of the copies that were folded into it
    copies: int  # that lie in each copy of the cluster around it
    is_module: bool  # whose inside is not shown
    is_peak: bool  # the step holds most while it, or its backward, runs
    is_again: bool  # backward recomputes some of it
    notes: tuple[str, ...]  # changes of a plan there

    def list_bytes(self, kind: str) -> tuple[int, ...]:
        """Lists the ``output``, ``saved`` or ``live`` bytes of each copy."""
        return tuple(sum(getattr(row, f"{kind}_bytes") for row in copy) for copy in self.rows)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A module or a segment whose inside is shown; ``names`` and ``copies`` as of a box."""

    key: str
    kind: Kind
    names: tuple[str, ...]
    copies: int
    children: tuple[Cluster | Box, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """The storages that one box takes from another, and their share of the largest edge's bytes.

    Of copies that were folded into one, the edge from each to the next leads backward.
    """

    tail: str
    head: str
    nbytes: tuple[int, ...]
    share: float
    is_backward: bool


@dataclass(frozen=True, slots=True)
class GraphView:
    """A picture of the graph of a step, with notes on the parts that are not shown."""

    document: Document
    planned_peak_bytes: int | None
    children: tuple[Cluster | Box, ...]
    edges: tuple[Edge, ...]
    notes: tuple[str, ...]


def build_view(
    document: Document, overlay: Overlay = NO_OVERLAY, detail: Detail | None = None
) -> GraphView:
    """Builds the content of a picture of a report, with a plan on its nodes.

    Without a ``detail``, it shows what a reader can take in.
    """
    nodes, detail = document.nodes, detail or Detail()
    peak = frozenset(i for i, node in enumerate(nodes) if node.name == document.headline.node)
    tree = wrap_segments(grow_tree(nodes), overlay.segments)
    if not detail.expand:
        tree = fold_repeats(
            tree, nodes, lambda i: (i in overlay.again, overlay.notes.get(i)), apart=peak
        )
    aim = AIM_PLAN_BOXES if overlay.segments else AIM_BOXES
    tree, notes = cut_tree(tree, nodes, detail, peak=peak, noted=overlay.notes.keys(), aim=aim)
    drawing = _Drawing(nodes, overlay, peak)
    children = tuple(drawing.draw(child, "", 1) for child in tree.children)
    edges = tuple(_connect(document, drawing.boxes))
    return GraphView(document, overlay.peak_bytes or None, children, edges, notes)


def list_boxes(children: Iterable[Cluster | Box]) -> Iterator[Box]:
    """Lists all boxes of a picture, in order."""
    for child in children:
        if isinstance(child, Box):
            yield child
        else:
            yield from list_boxes(child.children)


class _Drawing:
    """Makes the boxes and clusters of a tree, and remembers the box of each node."""

    def __init__(self, nodes: Sequence[NodeRow], overlay: Overlay, peak: frozenset[int]) -> None:
        self._nodes, self._overlay, self._peak = nodes, overlay, peak
        self._clusters = 0
        self.boxes: dict[int, int] = {}

    def draw(self, item: Item, around: str, copies_around: int) -> Cluster | Box:
        if isinstance(item, Leaf) or not item.is_open:
            return self._draw_box(item, around, copies_around)
        self._clusters += 1
        key = f"cluster_{self._clusters}"
        within = item.names[0] if item.kind is Kind.MODULE else around
        children = tuple(self.draw(child, within, len(item.names)) for child in item.children)
        return Cluster(key, item.kind, item.names, len(item.names) // copies_around, children)

    def _draw_box(self, item: Item, around: str, copies_around: int) -> Box:
        copies, overlay = [*_split_copies(item)], self._overlay
        indices, first = [i for copy in copies for i in copy], copies[0]
        number = 1 + max(self.boxes.values(), default=-1)
        self.boxes |= dict.fromkeys(indices, number)
        names = [self._nodes[index].name for index in first]
        local = [name.removeprefix(f"{around}.") if around else name for name in names]
        name = join_names(names)
        if isinstance(item, Leaf):
            title = name if local[0].isdecimal() else local[0]
        elif item.kind is Kind.RUN:
            title = join_names(local) if len(local) > 3 else ", ".join(local)
        else:
            name = title = join_names(item.names)
        notes, again = list[str](), sum(index in overlay.again for index in first)
        if again:
            notes.append("recomputed" if again == len(first) else f"{again} of them recomputed")
        changes = Counter(note for index in first for note in overlay.notes.get(index, ()))
        notes += [n if count == 1 else f"{n} ({count} times)" for n, count in changes.items()]
        return Box(
            key=f"box_{number}",
            title=title,
            name=name,
            rows=tuple(tuple(self._nodes[index] for index in copy) for copy in copies),
            copies=len(copies) // copies_around,
            is_module=isinstance(item, Tree) and item.kind is Kind.MODULE,
            is_peak=not self._peak.isdisjoint(indices),
            is_again=not overlay.again.isdisjoint(indices),
            notes=tuple(notes),
        )


def join_names(names: Sequence[str]) -> str:
    """Joins the first and the last of several names.

    >>> join_names(["h.0", "h.1", "h.2"])
    'h.0 ... h.2'
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def _split_copies(item: Item) -> Iterator[list[int]]:
    """Yields the nodes of each of the identical items that were folded into one."""
    copies = len(item.nodes) if isinstance(item, Leaf) else len(item.names)
    leaves = [*_list_leaves(item)]
    for copy in range(copies):
        # A leaf lies in a copy more than once where something in it was folded as well.
        sizes = [len(leaf) // copies for leaf in leaves]
        parts = (leaf[copy * n : (copy + 1) * n] for leaf, n in zip(leaves, sizes, strict=True))
        yield sorted(node for part in parts for node in part)


def _list_leaves(item: Item) -> Iterator[tuple[int, ...]]:
    if isinstance(item, Leaf):
        yield item.nodes
        return
    for child in item.children:
        yield from _list_leaves(child)


def _connect(document: Document, boxes: Mapping[int, int]) -> Iterator[Edge]:
    """Yields the edges between boxes: a storage goes along each of them once."""
    places = {document.nodes[index].name: box for index, box in boxes.items()}
    along: dict[tuple[int, int], dict[int, int]] = {}
    for tail, head, storages in build_digraph(document).edges(data="storages"):
        if tail in places and head in places and places[tail] != places[head]:
            along.setdefault((places[tail], places[head]), {}).update(storages)
    largest = max((sum(flow.values()) for flow in along.values()), default=0) or 1
    for (first, second), flow in along.items():
        share = sum(flow.values()) / largest
        nbytes = tuple(flow.values())
        yield Edge(f"box_{first}", f"box_{second}", nbytes, share, is_backward=first > second)

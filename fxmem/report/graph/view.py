"""The content of a picture of the graph: clusters, boxes, edges, and a plan over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fxmem.graph import SourceLocation
from fxmem.planning.plan import Plan, Segment
from fxmem.report.document import Document, NodeRow
from fxmem.report.graph.digraph import build_digraph
from fxmem.report.graph.tree import (
    AIM_BOXES,
    AIM_PLAN_BOXES,
    Detail,
    Item,
    Kind,
    Leaf,
    cut_tree,
    fold_repeats,
    grow_tree,
    list_nodes,
    wrap_segments,
)


@dataclass(frozen=True, slots=True)
class Overlay:
    """A plan on the nodes of a report.

    Attributes:
        segments: The name of each segment and the indices of its nodes; one that lies within
            another comes after it.
        again: Indices of the nodes that backward recomputes.
        notes: Changes in place and values freed early, by the index of the node where.
        peak_bytes: The peak with the plan.
    """

    segments: tuple[tuple[str, range], ...] = ()
    again: frozenset[int] = frozenset()
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    peak_bytes: int = 0


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


class Mark(str, Enum):
    """A property of a box that a picture shows."""

    PEAK = "peak"
    LIVE = "live"
    SAVED = "saved"
    AGAIN = "again"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or several that are shown as one.

    Attributes:
        key: Unique in the picture.
        title: Its name within the cluster around it.
        name: Its whole name, or the first and the last of several.
        target: What is called; empty where the box holds several nodes.
        nodes: Indices of the nodes that it stands for, those of all copies.
        copies: How many identical ones were folded into it.
        operations: How many nodes each of them has.
        is_module: Whether it stands for a module whose inside is not shown.
        shape: Of its result, the last one's where it holds several.
        dtype: Of that.
        output_bytes: New storages in the results, of each copy.
        saved_bytes: What it saves for backward, of each copy.
        live_bytes: What of it is alive at the peak, of each copy.
        marks: What it is marked as.
        notes: What a plan changes there.
        source: The user's line; None where it holds several nodes.
    """

    key: str
    title: str
    name: str
    target: str
    nodes: tuple[int, ...]
    copies: int
    operations: int
    is_module: bool
    shape: tuple[int, ...] | None
    dtype: str | None
    output_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    marks: frozenset[Mark]
    notes: tuple[str, ...]
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A module or a segment whose inside is shown.

    Attributes:
        key: Unique in the picture.
        kind: MODULE or SEGMENT.
        names: The whole name of each of the identical ones that were folded into it.
        copies: How many of them lie in each copy of the cluster around it.
        saved_bytes: What it saves for backward, all copies together.
        live_bytes: What of it is alive at the peak, all copies together.
        children: Its clusters and boxes.
    """

    key: str
    kind: Kind
    names: tuple[str, ...]
    copies: int
    saved_bytes: int
    live_bytes: int
    children: tuple[Cluster | Box, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """The storages that one box takes from another.

    Attributes:
        tail: Key of the box that makes them.
        head: Key of the box that takes them.
        nbytes: The size of each.
        share: Their sum over that of the largest edge, from 0 to 1.
        is_backward: It leads to the next of the copies that were folded into one.
    """

    tail: str
    head: str
    nbytes: tuple[int, ...]
    share: float
    is_backward: bool


@dataclass(frozen=True, slots=True)
class GraphView:
    """A picture of the graph of a step.

    Attributes:
        document: The report.
        planned_peak_bytes: The peak with the plan; None without one.
        children: Its clusters and boxes.
        edges: Between its boxes.
        notes: What is not shown, a sentence each.
    """

    document: Document
    planned_peak_bytes: int | None
    children: tuple[Cluster | Box, ...]
    edges: tuple[Edge, ...]
    notes: tuple[str, ...]


def build_view(
    document: Document, overlay: Overlay = NO_OVERLAY, detail: Detail | None = None
) -> GraphView:
    """Builds the content of a picture of a report.

    Args:
        document: The report.
        overlay: A plan on its nodes.
        detail: How much of the graph to show; by default what a reader can take in.
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
    return GraphView(
        document=document,
        planned_peak_bytes=overlay.peak_bytes or None,
        children=tuple(drawing.draw(child, "", 1) for child in tree.children),
        edges=tuple(_connect(document, drawing.boxes)),
        notes=notes,
    )


def list_boxes(children: Iterable[Cluster | Box]) -> Iterator[Box]:
    """Lists all boxes of a picture, in order."""
    for child in children:
        if isinstance(child, Box):
            yield child
        else:
            yield from list_boxes(child.children)


class _Drawing:
    """Makes the boxes and clusters of a tree, and remembers where each node went."""

    def __init__(self, nodes: Sequence[NodeRow], overlay: Overlay, peak: frozenset[int]) -> None:
        self._nodes, self._overlay, self._peak = nodes, overlay, peak
        self._clusters = 0
        self.boxes: dict[int, int] = {}

    def draw(self, item: Item, around: str, copies_around: int) -> Cluster | Box:
        if isinstance(item, Leaf) or not item.is_open:
            return self._draw_box(item, around, copies_around)
        self._clusters += 1
        key, indices = f"cluster_{self._clusters}", list_nodes(item)
        within = item.names[0] if item.kind is Kind.MODULE else around
        return Cluster(
            key=key,
            kind=item.kind,
            names=item.names,
            copies=len(item.names) // copies_around,
            saved_bytes=sum(self._nodes[i].saved_bytes for i in indices),
            live_bytes=sum(self._nodes[i].live_bytes for i in indices),
            children=tuple(self.draw(c, within, len(item.names)) for c in item.children),
        )

    def _draw_box(self, item: Item, around: str, copies_around: int) -> Box:
        copies = [*_split_copies(item)]
        rows = [[self._nodes[i] for i in copy] for copy in copies]
        number = 1 + max(self.boxes.values(), default=-1)
        self.boxes |= {i: number for copy in copies for i in copy}
        first = rows[0]
        shaped = next((row for row in reversed(first) if row.shape is not None), first[-1])
        name, title = self._name_box(item, around)
        return Box(
            key=f"box_{number}",
            title=title,
            name=name,
            target=first[0].target if len(first) == 1 else "",
            nodes=tuple(i for copy in copies for i in copy),
            copies=len(copies) // copies_around,
            operations=len(first),
            is_module=not isinstance(item, Leaf) and item.kind is Kind.MODULE,
            shape=shaped.shape,
            dtype=shaped.dtype,
            output_bytes=tuple(sum(row.output_bytes for row in copy) for copy in rows),
            saved_bytes=tuple(sum(row.saved_bytes for row in copy) for copy in rows),
            live_bytes=tuple(sum(row.live_bytes for row in copy) for copy in rows),
            marks=frozenset(self._mark(i for copy in copies for i in copy)),
            notes=tuple(self._note(copies[0])),
            source=first[0].source if len(first) == 1 else None,
        )

    def _name_box(self, item: Item, around: str) -> tuple[str, str]:
        """Finds the whole name, and the one within the cluster around it."""
        if isinstance(item, Leaf):
            name = self._nodes[item.nodes[0]].name
            short = _shorten(name, around)
            return name, name if short.isdecimal() else short
        name = join_names(item.names)
        if item.kind is not Kind.RUN:
            return name, name
        whole = [self._nodes[i].name for i in next(_split_copies(item))]
        local = [_shorten(name, around) for name in whole]
        return join_names(whole), join_names(local) if len(local) > 3 else ", ".join(local)

    def _mark(self, indices: Iterable[int]) -> Iterator[Mark]:
        for index in indices:
            row = self._nodes[index]
            if index in self._peak:
                yield Mark.PEAK
            if row.live_bytes:
                yield Mark.LIVE
            if row.saved_bytes:
                yield Mark.SAVED
            if index in self._overlay.again:
                yield Mark.AGAIN
            if index in self._overlay.notes:
                yield Mark.CHANGED

    def _note(self, indices: Sequence[int]) -> Iterator[str]:
        again = sum(i in self._overlay.again for i in indices)
        if again:
            yield "recomputed" if again == len(indices) else f"{again} of them recomputed"
        notes = [note for index in indices for note in self._overlay.notes.get(index, ())]
        for note, count in Counter(notes).items():
            yield note if count == 1 else f"{note} ({count} times)"


def _shorten(name: str, around: str) -> str:
    return name.removeprefix(f"{around}.") if around else name


def join_names(names: Sequence[str]) -> str:
    """Joins the first and the last of several names.

    >>> join_names(["h.0", "h.1", "h.2"])
    'h.0 ... h.2'
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def _split_copies(item: Item) -> Iterator[list[int]]:
    """Yields the nodes of each of the identical items that were folded into one."""
    if isinstance(item, Leaf):
        yield from ([node] for node in item.nodes)
        return
    leaves = [*_list_leaves(item)]
    for copy in range(len(item.names)):
        # A leaf lies in a copy more than once where something in it was folded as well.
        sizes = [len(leaf.nodes) // len(item.names) for leaf in leaves]
        yield sorted(
            node
            for leaf, size in zip(leaves, sizes, strict=True)
            for node in leaf.nodes[copy * size : (copy + 1) * size]
        )


def _list_leaves(item: Item) -> Iterator[Leaf]:
    if isinstance(item, Leaf):
        yield item
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

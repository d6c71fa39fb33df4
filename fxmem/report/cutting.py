"""How much of a graph a picture shows: what is opened, what is one box, what is left out."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fxmem.report.blocks import Block, Item, Kind, Leaf, list_nodes
from fxmem.report.document import NodeRow

AIM_BOXES = 40
"""So many a reader can take in: the depth is chosen for it."""
AIM_PLAN_BOXES = 60
"""With a plan, whose checkpoints often begin and end deep in the modules."""
MOST_BOXES = 1_000
"""Of more, Graphviz takes minutes where they are densely connected, and nobody reads them."""


@dataclass(frozen=True, slots=True)
class Detail:
    """How much of a graph to show.

    Attributes:
        depth: How many levels of modules; None for as many as fit, and all of those around
            the peak.
        expand: Show every operation and each of the blocks that repeat.
    """

    depth: int | None = None
    expand: bool = False


def cut_tree(
    tree: Block,
    nodes: Sequence[NodeRow],
    detail: Detail,
    *,
    peak: Collection[int],
    noted: Collection[int] = (),
    aim: int = AIM_BOXES,
) -> tuple[Block, tuple[str, ...]]:
    """The part of a tree that a picture shows.

    Args:
        tree: The tree.
        nodes: All nodes.
        detail: How much to show.
        peak: Index of the node at the peak, if there is one: where the depth is chosen, what is
            around it is opened.
        noted: Indices of nodes that are to be seen on their own.
        aim: How many boxes there should be at most, where the depth is chosen.

    Returns:
        The tree, with blocks closed and runs of nodes joined; and what is not as it was asked
        for, a sentence each.
    """
    notes: list[str] = []
    if not detail.expand:
        tree, hidden = _hide_sizes(tree, nodes)
        if hidden:
            what = "operation on sizes is" if hidden == 1 else "operations on sizes are"
            notes.append(f"{hidden} {what} left out.")
        apart = frozenset((*peak, *noted))
        tree = _skip_wrappers(_join_views(tree, nodes, apart))
    opened = frozenset(peak) if detail.depth is None else frozenset()
    levels = _count_levels(tree)
    aimed = levels if detail.expand else _choose_depth(tree, opened, aim)
    wanted = aimed if detail.depth is None else min(detail.depth, levels)
    depth = wanted
    if count_boxes(tree, depth, opened) > MOST_BOXES:
        depth = min(wanted, _choose_depth(tree, opened, MOST_BOXES))
        if depth < wanted:
            notes.append(f"Cut to a depth of {depth}: more than {MOST_BOXES} boxes otherwise.")
    tree = _close(tree, depth, opened)
    count = count_boxes(tree, depth, opened)
    if count > MOST_BOXES:
        tree = _join_long(tree, frozenset(peak), MOST_BOXES / count)
        notes.append(f"{count} boxes are more than {MOST_BOXES}: long runs of them are joined.")
    return tree, tuple(notes)


def count_boxes(item: Item, depth: int, opened: frozenset[int] = frozenset()) -> int:
    """How many boxes a part of the tree makes.

    Args:
        item: The part.
        depth: How many levels of modules are opened, this one included.
        opened: Indices of nodes; what is around them is opened at any depth.
    """
    if isinstance(item, Leaf) or not _is_opened(item, depth, opened):
        return 1
    return sum(count_boxes(child, _descend(item, depth), opened) for child in item.children)


def _choose_depth(tree: Block, opened: frozenset[int], most: int) -> int:
    """The largest depth that makes no more than that many boxes; at least 1."""
    depths = range(1, _count_levels(tree) + 1)
    fitting = bisect_right(depths, most, key=lambda depth: count_boxes(tree, depth, opened))
    return max(fitting, 1)


def _count_levels(item: Item) -> int:
    if isinstance(item, Leaf):
        return 0
    return 1 + max(map(_count_levels, item.children), default=0)


def _is_opened(block: Block, depth: int, opened: frozenset[int]) -> bool:
    if not block.is_open or block.kind is Kind.RUN:
        return False
    if block.kind is Kind.SEGMENT or depth > 0:
        return True
    return not opened.isdisjoint(list_nodes(block))


def _descend(block: Block, depth: int) -> int:
    return depth - 1 if block.kind is Kind.MODULE else depth


def _close(item: Item, depth: int, opened: frozenset[int]) -> Block:
    assert isinstance(item, Block)
    children: list[Item] = []
    for child in item.children:
        if isinstance(child, Block):
            below = _descend(item, depth)
            child = (
                _close(child, below, opened)
                if _is_opened(child, below, opened)
                else replace(child, is_open=False)
            )
        children.append(child)
    return replace(item, children=tuple(children))


def _hide_sizes(block: Block, nodes: Sequence[NodeRow]) -> tuple[Block, int]:
    """Without the nodes that only work on sizes, and how many they are."""
    children: list[Item] = []
    hidden = 0
    for child in block.children:
        if isinstance(child, Block):
            child, inside = _hide_sizes(child, nodes)
            hidden += inside
            if child.children:
                children.append(child)
        elif _is_size(nodes[child.nodes[0]]):
            hidden += len(child.nodes)
        else:
            children.append(child)
    return replace(block, children=tuple(children)), hidden


def _is_size(node: NodeRow) -> bool:
    has_bytes = node.output_bytes or node.saved_bytes or node.live_bytes or node.results
    return node.shape is None and not has_bytes and node.op not in ("placeholder", "output")


def _skip_wrappers(block: Block) -> Block:
    """Without modules that hold one other and nothing else, such as lists of layers."""
    children = tuple(_skip_wrappers(c) if isinstance(c, Block) else c for c in block.children)
    if len(children) == 1 and block.kind is Kind.MODULE and block.names != ("",):
        inner = children[0]
        if isinstance(inner, Block) and inner.kind is Kind.MODULE:
            return inner
    return replace(block, children=children)


def _join_views(block: Block, nodes: Sequence[NodeRow], apart: frozenset[int]) -> Block:
    """Joins nodes that follow from each other and neither make nor keep memory."""
    children: list[Item] = []
    for child in block.children:
        if isinstance(child, Block):
            child = _join_views(child, nodes, apart)
        last = children[-1] if children else None
        if last is not None and _goes_on(last, child, nodes, apart):
            children[-1] = _join(last, child)
        else:
            children.append(child)
    return replace(block, children=tuple(children))


def _goes_on(last: Item, item: Item, nodes: Sequence[NodeRow], apart: frozenset[int]) -> bool:
    if isinstance(item, Block) or (isinstance(last, Block) and last.kind is not Kind.RUN):
        return False
    indices = (*list_nodes(last), *item.nodes)
    if not apart.isdisjoint(indices) or not all(_is_view(nodes[index]) for index in indices):
        return False
    return max(list_nodes(last)[:: len(item.nodes)]) in nodes[item.nodes[0]].inputs


def _is_view(node: NodeRow) -> bool:
    makes = node.output_bytes or node.saved_bytes or node.live_bytes
    return not makes and node.op not in ("placeholder", "output")


def _join(*items: Item) -> Block:
    """One closed block of several parts of the tree, all copies of them."""
    parts = [
        part
        for item in items
        for part in (
            item.children if isinstance(item, Block) and item.kind is Kind.RUN else (item,)
        )
    ]
    copies = next(len(p.nodes) if isinstance(p, Leaf) else len(p.names) for p in parts)
    return Block(Kind.RUN, ("",) * copies, tuple(parts), is_open=False)


def _join_long(block: Block, apart: frozenset[int], share: float) -> Block:
    """Joins parts that follow each other, so that a block has about that share of them."""
    size = math.ceil(1 / share)
    children: list[Item] = []
    for child in block.children:
        if isinstance(child, Block) and child.is_open:
            child = _join_long(child, apart, share)
        children.append(child)
    joined: list[Item] = []
    for is_whole, group in groupby(children, key=lambda child: _stays(child, apart)):
        parts = [*group]
        chunks = [parts[i : i + size] for i in range(0, len(parts), size)]
        joined += parts if is_whole else [c[0] if len(c) == 1 else _join(*c) for c in chunks]
    return replace(block, children=tuple(joined))


def _stays(item: Item, apart: frozenset[int]) -> bool:
    is_open = isinstance(item, Block) and item.is_open
    return is_open or not apart.isdisjoint(list_nodes(item))

"""The tree of a model's modules: repeated identical subtrees folded, and cut to a readable size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from itertools import groupby

from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.report.document import NodeRow

AIM_BOXES = 24, 48  # that a reader can take in: up to which modules are opened, and large ones
AIM_PLAN_BOXES = 40, 60  # segments of a plan often begin and end deep in the modules
_LARGE_SHARE = 0.2  # of the bytes that all nodes hold: such a module is opened before others
_LITTLE = 0.001  # of the largest result: nodes that hold no more are joined
MOST_BOXES = 1_000  # of more, Graphviz takes minutes where they are densely connected


class Kind(str, Enum):
    """The reason why the nodes of a subtree belong together; a run is of joined views."""

    MODULE = "module"
    SEGMENT = "segment"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node, or the same node of each of the identical subtrees that were folded into one."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A module, a segment of a plan, or consecutive nodes that are shown as one."""

    kind: Kind
    names: tuple[str, ...]  # of each copy that was folded into it; empty for the model itself
    children: tuple[Leaf | Tree, ...]
    is_open: bool = True  # a picture shows its inside


Item = Leaf | Tree


@dataclass(frozen=True, slots=True)
class Detail:
    """The levels of modules to show, or as many as fit; or every operation and repeated subtree."""

    depth: int | None = None
    expand: bool = False


def list_nodes(item: Item) -> tuple[int, ...]:
    """Lists the indices of all nodes in a part of the tree.

    >>> list_nodes(Tree(Kind.MODULE, ("",), (Leaf((0,)), Leaf((1, 2)))))
    (0, 1, 2)
    """
    if isinstance(item, Leaf):
        return item.nodes
    return tuple(node for child in item.children for node in list_nodes(child))


def grow_tree(nodes: Sequence[NodeRow]) -> Tree:
    """Grows the tree of the modules' calls from all nodes, in order of execution.

    A subtree is consecutive nodes: of a list of layers between which other things run, each layer
    is a subtree of its own, and so is each call of a module that is called again. So every edge
    of the graph leads from a subtree to a later one. A leaf module lies in the module around it.
    """
    paths = []
    for index, node in enumerate(nodes):
        around = node.fqn.rpartition(".")[0] if node.op == "call_module" else node.fqn
        paths.append((index, ("loss" if node.phase is Phase.LOSS else around).split(".")))

    def grow(paths: Iterable[tuple[int, list[str]]], around: tuple[str, ...]) -> tuple[Item, ...]:
        depth, items = len(around), list[Item]()
        for part, group in groupby(paths, key=lambda path: "".join(path[1][depth : depth + 1])):
            if not part:
                items += [Leaf((index,)) for index, _ in group]
                continue
            inside, name = grow(group, (*around, part)), ".".join((*around, part))
            # A subtree of one node says no more than the node.
            is_one = len(inside) == 1 and isinstance(inside[0], Leaf)
            items.append(inside[0] if is_one else Tree(Kind.MODULE, (name,), inside))
        return tuple(items)

    return Tree(Kind.MODULE, ("",), grow(paths, ()))


def wrap_segments(tree: Tree, segments: Iterable[tuple[str, Collection[int]]]) -> Tree:
    """Puts the nodes of segments, each with a name, into subtrees of their own.

    A segment may begin in one module and end in another: it is then a subtree in each of them.
    One that lies within another comes after it.
    """

    def wrap(tree: Tree, name: str, nodes: frozenset[int]) -> Tree:
        children: list[Item] = []
        for where, group in groupby(tree.children, key=lambda item: place(item, nodes)):
            if where == "wholly":
                children.append(Tree(Kind.SEGMENT, (name,), tuple(group)))
            elif where == "partly":
                children += [wrap(child, name, nodes) for child in group if isinstance(child, Tree)]
            else:
                children += group
        return replace(tree, children=tuple(children))

    def place(item: Item, nodes: frozenset[int]) -> str:
        inside = [node in nodes for node in list_nodes(item)]
        if isinstance(item, Tree) and item.kind is Kind.SEGMENT and any(inside):
            return "partly"  # a segment that came before this one is around it
        return "wholly" if all(inside) else "partly" if any(inside) else "not"

    for name, nodes in segments:
        tree = wrap(tree, name, frozenset(nodes))
    return tree


def fold_repeats(
    tree: Tree,
    nodes: Sequence[NodeRow],
    mark: Callable[[int], Hashable],
    apart: Collection[int] = (),
) -> Tree:
    """Folds subtrees that follow each other and are identical into one.

    Identical are subtrees whose nodes have the same names within them, call the same, on the same
    shapes and dtypes, and are connected in the same way; what they take from outside may differ.
    ``mark`` gives what else must be the same of a node, by its index; subtrees with nodes of
    ``apart`` are not folded.
    """
    alone = frozenset(apart)

    def fold(tree: Tree) -> Tree:
        items = (item if isinstance(item, Leaf) else fold(item) for item in tree.children)
        return replace(tree, children=tuple(_merge([*g]) for _, g in groupby(items, key=sign)))

    def sign(item: Item) -> Hashable:
        """Signs an item: alike for two that fold; for one that must not be folded, its own."""
        indices = list_nodes(item)
        if isinstance(item, Leaf) or not alone.isdisjoint(indices):
            return indices
        places = {node: place for place, node in enumerate(indices)}
        wiring = tuple(
            tuple(places[i] for i in nodes[node].inputs if i in places) for node in indices
        )
        return describe(item, item.names[0], named=False), wiring

    def describe(item: Item, around: str, *, named: bool) -> Hashable:
        if isinstance(item, Leaf):
            node = nodes[item.nodes[0]]
            name = node.name[len(around) :] if named else ""
            return name, node.target, node.shape, node.dtype, tuple(map(mark, item.nodes))
        is_module = item.kind is Kind.MODULE
        name = item.names[0][len(around) :] if named and is_module else ""
        around = item.names[0] if is_module else around
        # The nodes of a segment are at another place in each of its copies.
        inside = tuple(describe(child, around, named=is_module) for child in item.children)
        return item.kind, name, len(item.names), inside

    return fold(tree)


def _merge(items: Sequence[Item]) -> Item:
    if len(items) == 1:
        return items[0]
    trees = [item for item in items if isinstance(item, Tree)]
    if not trees:
        return Leaf(tuple(node for item in items for node in list_nodes(item)))
    names = tuple(name for tree in trees for name in tree.names)
    children = map(_merge, zip(*(tree.children for tree in trees), strict=True))
    return replace(trees[0], names=names, children=tuple(children))


def cut_tree(
    tree: Tree,
    nodes: Sequence[NodeRow],
    detail: Detail,
    *,
    peak: Collection[int],
    noted: Collection[int] = (),
    aim: tuple[int, int] = AIM_BOXES,
) -> tuple[Tree, tuple[str, ...]]:
    """Closes subtrees and joins nodes that hold next to nothing; adds notes on the parts left out.

    Unless a depth is given, all around the ``peak`` is open, and of the other modules the
    fullest, as far as there are at most ``aim`` boxes: the first figure is for any module, the
    second for those with a large share of all bytes. Nodes that are ``noted`` are to be seen on
    their own.
    """
    notes: list[str] = []
    if not detail.expand:
        hidden: list[int] = []
        tree = _simplify(tree, nodes, frozenset((*peak, *noted)), hidden)
        if hidden:
            operations = "operation on sizes is" if len(hidden) == 1 else "operations on sizes are"
            notes.append(f"{len(hidden)} {operations} left out.")
    levels = _count_levels(tree)

    def cut(depth: int) -> Tree:
        return _close(tree, lambda _, level: level < depth)

    if detail.depth is None and not detail.expand:
        closed = _open_largest(tree, nodes, frozenset(peak), aim)
    else:
        wanted = levels if detail.depth is None else min(detail.depth, levels)
        depths = range(1, wanted + 1)
        depth = max(bisect_right(depths, MOST_BOXES, key=lambda d: _count_boxes(cut(d))), 1)
        if depth < wanted:
            notes.append(f"Cut to a depth of {depth}: more than {MOST_BOXES} boxes otherwise.")
        closed = cut(depth)
    count = _count_boxes(closed)
    if count > MOST_BOXES:
        raise UsageError(
            f"the graph has {count} boxes at its first level, more than the {MOST_BOXES} that "
            "can be drawn",
            hint="use to_networkx() or the tables of an .html report",
        )
    return closed, tuple(notes)


def _simplify(
    tree: Tree, nodes: Sequence[NodeRow], apart: frozenset[int], hidden: list[int]
) -> Tree:
    """Leaves out work on sizes, joins nodes that hold little, and unwraps lists of modules.

    Nodes that are to stand ``apart`` are not joined; those left out are added to ``hidden``.
    """
    least_bytes = _LITTLE * max((node.output_bytes for node in nodes), default=0)
    sizes: dict[int, int] = {}  # of storages, by the node that made them
    for node in nodes:
        for index in node.results:
            sizes.setdefault(index, node.output_bytes)

    def follows(last: Item, item: Leaf) -> bool:
        """Returns whether an item is shown as one with the last: its view, or as little."""
        if isinstance(last, Tree) and last.kind is not Kind.RUN:
            return False
        before, rows = list_nodes(last), [nodes[index] for index in item.nodes]
        joined = [*(nodes[index] for index in before), *rows]
        is_apart = not apart.isdisjoint((*before, *item.nodes))
        if is_apart or any(row.op in ("placeholder", "output") for row in joined):
            return False
        if any(_measure_held([row]) > least_bytes for row in joined):
            return False
        is_little = all(sizes[i] <= least_bytes for row in joined for i in row.results)
        return is_little or max(before[:: len(item.nodes)]) in rows[0].inputs

    children: list[Item] = []
    for child in tree.children:
        if isinstance(child, Tree):
            child = _simplify(child, nodes, apart, hidden)
            children += [child] if child.children else []
        elif _is_size(nodes[child.nodes[0]]):
            hidden += child.nodes
        elif children and follows(children[-1], child):
            last = children[-1]
            parts = last.children if isinstance(last, Tree) else (last,)
            names = ("",) * len(child.nodes)
            children[-1] = Tree(Kind.RUN, names, (*parts, child), is_open=False)
        else:
            children.append(child)
    if len(children) == 1 and tree.kind is Kind.MODULE and tree.names != ("",):
        only = children[0]
        if isinstance(only, Tree) and only.kind is Kind.MODULE:
            return only
    return replace(tree, children=tuple(children))


def _is_size(node: NodeRow) -> bool:
    is_empty = not _measure_held([node]) and node.op not in ("placeholder", "output")
    return is_empty and node.shape is None and not node.results


def _measure_held(rows: Iterable[NodeRow]) -> int:
    return sum(row.output_bytes + row.saved_bytes + row.live_bytes for row in rows)


def _open_largest(
    tree: Tree, nodes: Sequence[NodeRow], peak: frozenset[int], aim: tuple[int, int]
) -> Tree:
    """Closes all modules except the ones around the peak and the fullest."""
    opened, large_bytes = set[int](), _LARGE_SHARE * _measure_held(nodes)
    waiting: list[tuple[int, int, Tree]] = []  # modules that are shown closed, the largest first

    def show(tree: Tree) -> int:
        """Opens a subtree, and returns the number of its boxes."""
        boxes = 0
        for child in tree.children:
            if isinstance(child, Leaf) or not child.is_open:
                boxes += 1
                continue
            indices = list_nodes(child)
            if child.kind is Kind.SEGMENT or not peak.isdisjoint(indices):
                opened.add(id(child))
                boxes += show(child)
                continue
            held_bytes = _measure_held(nodes[index] for index in indices)
            heappush(waiting, (-held_bytes, indices[0], child))
            boxes += 1
        return boxes

    boxes = show(tree)
    while waiting:
        negative_bytes, _, largest = heappop(waiting)
        before = [*waiting]
        more = show(largest) - 1
        if boxes + more <= aim[-negative_bytes >= large_bytes]:
            boxes += more
            opened.add(id(largest))
        else:
            waiting = before
    return _close(tree, lambda child, _: id(child) in opened)


def _close(tree: Tree, is_shown: Callable[[Tree, int], bool], level: int = 0) -> Tree:
    """Closes the modules that are not to be shown, each judged by itself and its level."""
    level += tree.kind is Kind.MODULE

    def close(child: Item) -> Item:
        if isinstance(child, Leaf) or not child.is_open:
            return child
        if child.kind is Kind.SEGMENT or is_shown(child, level):
            return _close(child, is_shown, level)
        return replace(child, is_open=False)

    return replace(tree, children=tuple(map(close, tree.children)))


def _count_boxes(item: Item) -> int:
    if isinstance(item, Leaf) or not item.is_open:
        return 1
    return sum(map(_count_boxes, item.children))


def _count_levels(item: Item) -> int:
    if isinstance(item, Leaf):
        return 0
    return 1 + max(map(_count_levels, item.children), default=0)

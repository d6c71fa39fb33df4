"""The tree of a model's modules: repeated identical subtrees folded, and cut to a readable size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.report.document import NodeRow

AIM_BOXES = 40
"""The boxes that a reader can take in, for which the depth is chosen."""
AIM_PLAN_BOXES = 60
"""With a plan, whose segments often begin and end deep in the modules."""
MOST_BOXES = 1_000
"""Of more, Graphviz takes minutes where they are densely connected, and nobody reads them."""


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
    """A module, a segment of a plan, or consecutive nodes that are shown as one.

    It has the qualified name of each copy that was folded into it, empty for the model itself;
    where it is not open, a picture does not show its inside.
    """

    kind: Kind
    names: tuple[str, ...]
    children: tuple[Leaf | Tree, ...]
    is_open: bool = True


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


def find_module(node: NodeRow) -> str:
    """Finds the qualified name of the module around a node; a leaf module is not its own.

    >>> find_module(NodeRow(0, "a.b.0", fqn="a.b.0", op="call_module", target="ReLU"))
    'a.b'
    """
    if node.phase is Phase.LOSS:
        return "loss"
    return node.fqn.rpartition(".")[0] if node.op == "call_module" else node.fqn


def grow_tree(nodes: Sequence[NodeRow]) -> Tree:
    """Grows the tree of the modules' calls, each where it runs.

    A subtree is consecutive nodes: of a list of layers between which other things run, each layer
    is a subtree of its own, and so is each call of a module that is called again. So every edge
    of the graph leads from a subtree to a later one.

    Args:
        nodes: All of them, in order of execution.
    """
    paths = [(index, find_module(node).split(".")) for index, node in enumerate(nodes)]

    def grow(paths: Iterable[tuple[int, list[str]]], around: tuple[str, ...]) -> tuple[Item, ...]:
        depth, items = len(around), list[Item]()
        for part, group in groupby(paths, key=lambda path: "".join(path[1][depth : depth + 1])):
            if not part:
                items += [Leaf((index,)) for index, _ in group]
                continue
            inside = grow(group, (*around, part))
            # A subtree of one node says no more than the node.
            is_one = len(inside) == 1 and isinstance(inside[0], Leaf)
            name = ".".join((*around, part))
            items.append(inside[0] if is_one else Tree(Kind.MODULE, (name,), inside))
        return tuple(items)

    return Tree(Kind.MODULE, ("",), grow(paths, ()))


def wrap_segments(tree: Tree, segments: Iterable[tuple[str, Collection[int]]]) -> Tree:
    """Puts the nodes of segments into subtrees of their own.

    A segment may begin in one module and end in another: it is then a subtree in each of them.

    Each has a name and its nodes; one that lies within another comes after it.
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

    Args:
        tree: The tree.
        nodes: All nodes.
        mark: Gives what else must be the same of a node, by its index.
        apart: Indices of nodes whose subtrees are not folded.
    """
    alone = frozenset(apart)

    def fold(item: Item) -> Item:
        if isinstance(item, Leaf):
            return item
        groups = [[*group] for _, group in groupby(map(fold, item.children), key=sign)]
        return replace(item, children=tuple(g[0] if len(g) == 1 else _merge(g) for g in groups))

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

    folded = fold(tree)
    assert isinstance(folded, Tree)
    return folded


def _merge(items: Sequence[Item]) -> Item:
    first = items[0]
    if isinstance(first, Leaf):
        return Leaf(tuple(node for item in items for node in list_nodes(item)))
    trees = [item for item in items if isinstance(item, Tree)]
    return Tree(
        first.kind,
        tuple(name for tree in trees for name in tree.names),
        tuple(map(_merge, zip(*(tree.children for tree in trees), strict=True))),
    )


def cut_tree(
    tree: Tree,
    nodes: Sequence[NodeRow],
    detail: Detail,
    *,
    peak: Collection[int],
    noted: Collection[int] = (),
    aim: int = AIM_BOXES,
) -> tuple[Tree, tuple[str, ...]]:
    """Cuts a tree to the part that a picture shows.

    Args:
        tree: The tree.
        nodes: All nodes.
        detail: How much to show.
        peak: The node at the peak, if any: opened around, unless a depth is given.
        noted: Nodes that are to be seen on their own.
        aim: The boxes to have at most, unless a depth is given.

    Returns:
        The tree, with subtrees closed and views joined; and notes on the parts left out.

    Raises:
        UsageError: Even the first level has too many boxes.
    """
    notes: list[str] = []
    if not detail.expand:
        hidden: list[int] = []
        tree = _simplify(tree, nodes, frozenset((*peak, *noted)), hidden)
        if hidden:
            operations = "operation on sizes is" if len(hidden) == 1 else "operations on sizes are"
            notes.append(f"{len(hidden)} {operations} left out.")
    opened = frozenset(peak) if detail.depth is None else frozenset()
    levels = _count_levels(tree)
    wanted = levels if detail.expand else _choose_depth(tree, opened, aim)
    if detail.depth is not None:
        wanted = min(detail.depth, levels)
    depth = min(wanted, _choose_depth(tree, opened, MOST_BOXES))
    if depth < wanted:
        notes.append(f"Cut to a depth of {depth}: more than {MOST_BOXES} boxes otherwise.")
    tree = _close(tree, depth, opened)
    count = _count_boxes(tree)
    if count > MOST_BOXES:
        raise UsageError(
            f"the graph has {count} boxes at its first level, more than the {MOST_BOXES} that "
            "can be drawn",
            hint="use to_networkx() or the tables of an .html report",
        )
    return tree, tuple(notes)


def _simplify(
    tree: Tree, nodes: Sequence[NodeRow], apart: frozenset[int], hidden: list[int]
) -> Tree:
    """Leaves out work on sizes, joins views that follow each other, and unwraps lists of modules.

    Nodes that are to stand ``apart`` are not joined; those left out are added to ``hidden``.
    """

    def is_empty(node: NodeRow) -> bool:
        is_held = node.output_bytes or node.saved_bytes or node.live_bytes
        return not is_held and node.op not in ("placeholder", "output")

    def is_size(node: NodeRow) -> bool:
        return node.shape is None and not node.results

    def follows(last: Item, item: Leaf) -> bool:
        if isinstance(last, Tree) and last.kind is not Kind.RUN:
            return False
        indices = (*list_nodes(last), *item.nodes)
        if not apart.isdisjoint(indices) or not all(is_empty(nodes[i]) for i in indices):
            return False
        return max(list_nodes(last)[:: len(item.nodes)]) in nodes[item.nodes[0]].inputs

    children: list[Item] = []
    for child in tree.children:
        if isinstance(child, Tree):
            child = _simplify(child, nodes, apart, hidden)
            children += [child] if child.children else []
        elif is_empty(nodes[child.nodes[0]]) and is_size(nodes[child.nodes[0]]):
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


def _close(tree: Tree, depth: int, opened: frozenset[int]) -> Tree:
    """Closes the modules below a depth, except around some nodes."""
    below = depth - 1 if tree.kind is Kind.MODULE else depth

    def close(child: Item) -> Item:
        if isinstance(child, Leaf) or not child.is_open:
            return child
        if child.kind is Kind.SEGMENT or below > 0 or not opened.isdisjoint(list_nodes(child)):
            return _close(child, below, opened)
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


def _choose_depth(tree: Tree, opened: frozenset[int], most: int) -> int:
    """Chooses the largest depth with at most so many boxes, but not less than 1."""
    depths = range(1, _count_levels(tree) + 1)
    fitting = bisect_right(depths, most, key=lambda d: _count_boxes(_close(tree, d, opened)))
    return max(fitting, 1)

"""The tree of a model's modules, in which repeated identical blocks are folded into one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from fxmem.graph import Phase
from fxmem.report.document import NodeRow


class Kind(str, Enum):
    """What holds a block together."""

    MODULE = "module"
    SEGMENT = "segment"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node, or the same node of each of the identical blocks that were folded into one.

    Attributes:
        nodes: Its indices, one for each copy, in order.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes and blocks that belong together.

    Attributes:
        kind: A module, a segment of a plan, or a run of nodes that are shown as one.
        names: The qualified name of each copy, in order; empty for the model itself.
        children: What is in it, in order of execution.
        is_open: Whether a picture shows what is in it.
    """

    kind: Kind
    names: tuple[str, ...]
    children: tuple[Leaf | Block, ...]
    is_open: bool = True


Item = Leaf | Block


def list_nodes(item: Item) -> tuple[int, ...]:
    """The indices of all nodes in a part of the tree.

    >>> list_nodes(Block(Kind.MODULE, ("",), (Leaf((0,)), Leaf((1, 2)))))
    (0, 1, 2)
    """
    if isinstance(item, Leaf):
        return item.nodes
    return tuple(node for child in item.children for node in list_nodes(child))


def find_module(node: NodeRow) -> str:
    """The qualified name of the module around a node; that of a leaf module is not its own.

    >>> row = NodeRow(0, "a.b.0", fqn="a.b.0", op="call_module", target="ReLU")
    >>> find_module(row)
    'a.b'
    """
    if node.phase is Phase.LOSS:
        return "loss"
    return node.fqn.rpartition(".")[0] if node.op == "call_module" else node.fqn


def grow_tree(nodes: Sequence[NodeRow]) -> Block:
    """The tree of the modules' calls, each where it runs.

    A block is a run of nodes: of a list of layers between which other things run, each layer is
    a block of its own, and so is each call of a module that is called again. So every edge of
    the graph leads from a block to a later one.

    Args:
        nodes: All of them, in order of execution.
    """
    paths = [(index, find_module(node).split(".")) for index, node in enumerate(nodes)]
    return Block(Kind.MODULE, ("",), _grow(paths, ()))


def _grow(paths: Iterable[tuple[int, list[str]]], around: tuple[str, ...]) -> tuple[Item, ...]:
    depth = len(around)
    items: list[Item] = []
    for part, group in groupby(paths, key=lambda path: "".join(path[1][depth : depth + 1])):
        if not part:
            items += [Leaf((index,)) for index, _ in group]
            continue
        inside = _grow(group, (*around, part))
        # A block of one node says no more than the node.
        is_one = len(inside) == 1 and isinstance(inside[0], Leaf)
        name = ".".join((*around, part))
        items.append(inside[0] if is_one else Block(Kind.MODULE, (name,), inside))
    return tuple(items)


def wrap_segments(block: Block, segments: Iterable[tuple[str, Collection[int]]]) -> Block:
    """Puts the nodes of segments into blocks of their own.

    A segment may begin in one module and end in another: it is then a block in each of them.

    Args:
        block: The tree.
        segments: The name and the nodes of each; one that lies within another after it.
    """
    for name, nodes in segments:
        block = _wrap_segment(block, name, frozenset(nodes))
    return block


def _wrap_segment(block: Block, name: str, nodes: frozenset[int]) -> Block:
    def place(item: Item) -> str:
        inside = [node in nodes for node in list_nodes(item)]
        if isinstance(item, Block) and item.kind is Kind.SEGMENT and any(inside):
            return "partly"  # a segment that came before this one is around it
        return "wholly" if all(inside) else "partly" if any(inside) else "not"

    children: list[Item] = []
    for where, group in groupby(block.children, key=place):
        if where == "wholly":
            children.append(Block(Kind.SEGMENT, (name,), tuple(group)))
        elif where == "partly":
            children += [_wrap_segment(c, name, nodes) for c in group if isinstance(c, Block)]
        else:
            children += group
    return replace(block, children=tuple(children))


def fold_repeats(
    block: Block,
    nodes: Sequence[NodeRow],
    mark: Callable[[int], Hashable],
    apart: Collection[int] = (),
) -> Block:
    """Folds blocks that follow each other and are identical into one.

    Identical are blocks whose nodes have the same names within them, call the same, on the same
    shapes and dtypes, and are connected in the same way; what they take from outside may differ.

    Args:
        block: The tree.
        nodes: All nodes.
        mark: What else must be the same of a node, by its index.
        apart: Indices of nodes whose blocks are not folded.
    """
    folder = _Folder(nodes, mark, frozenset(apart))
    folded = folder.fold(block)
    assert isinstance(folded, Block)
    return folded


class _Folder:
    def __init__(
        self, nodes: Sequence[NodeRow], mark: Callable[[int], Hashable], apart: frozenset[int]
    ) -> None:
        self._nodes, self._mark, self._apart = nodes, mark, apart

    def fold(self, item: Item) -> Item:
        if isinstance(item, Leaf):
            return item
        children: list[Item] = []
        for _, group in groupby(map(self.fold, item.children), key=self._sign):
            same = [*group]
            children.append(same[0] if len(same) == 1 else _merge(same))
        return replace(item, children=tuple(children))

    def _sign(self, item: Item) -> Hashable:
        """What two blocks that fold have in common; of one that must not be folded, its own."""
        indices = list_nodes(item)
        if isinstance(item, Leaf) or not self._apart.isdisjoint(indices):
            return indices
        places = {node: place for place, node in enumerate(indices)}
        wiring = tuple(
            tuple(places[i] for i in self._nodes[node].inputs if i in places) for node in indices
        )
        return self._describe(item, item.names[0], named=False), wiring

    def _describe(self, item: Item, around: str, *, named: bool) -> Hashable:
        if isinstance(item, Leaf):
            node = self._nodes[item.nodes[0]]
            name = node.name[len(around) :] if named else ""
            marks = tuple(self._mark(index) for index in item.nodes)
            return name, node.target, node.shape, node.dtype, marks
        own = item.names[0]
        is_module = item.kind is Kind.MODULE
        name = own[len(around) :] if named and is_module else ""
        around = own if is_module else around
        # What a segment holds directly is at another place in each of its copies.
        inside = tuple(self._describe(child, around, named=is_module) for child in item.children)
        return item.kind, name, len(item.names), inside


def _merge(items: Sequence[Item]) -> Item:
    first = items[0]
    if isinstance(first, Leaf):
        return Leaf(tuple(node for item in items for node in list_nodes(item)))
    blocks = [item for item in items if isinstance(item, Block)]
    return Block(
        first.kind,
        tuple(name for block in blocks for name in block.names),
        tuple(map(_merge, zip(*(block.children for block in blocks), strict=True))),
    )

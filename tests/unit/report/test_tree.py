from __future__ import annotations

import dataclasses

import pytest
from pictures import make_chain, make_row

from fxmem.graph import Phase
from fxmem.report.document import NodeRow
from fxmem.report.graph.tree import (
    Kind,
    Leaf,
    Tree,
    fold_repeats,
    grow_tree,
    wrap_segments,
)


def module(name: str, *children: Leaf | Tree) -> Tree:
    return Tree(Kind.MODULE, (name,), children)


def leaf(*nodes: int) -> Leaf:
    return Leaf(nodes)


def grow(*names: str) -> Tree:
    return grow_tree(make_chain(names).nodes)


def fold(names: list[str], apart: set[int] = frozenset(), marks: set[int] = frozenset()) -> Tree:
    nodes = make_chain(names).nodes
    return fold_repeats(grow_tree(nodes), nodes, lambda index: index in marks, apart)


BLOCKS = [f"h.{block}.{name}" for block in range(4) for name in ("norm", "linear")]


def test_nodes_lie_in_the_modules_that_their_names_say() -> None:
    parts = module("h", leaf(1), leaf(2)), leaf(3), module("h", leaf(4), leaf(5))
    assert grow("x", "h.a", "h.b", "y", "h.c", "h.d") == module("", leaf(0), *parts)


def test_a_leaf_module_lies_in_the_one_around_it_and_the_loss_in_its_own() -> None:
    calls = [make_row(f"a.{i}", i, fqn=f"a.{i}", op="call_module") for i in range(2)]
    losses = [make_row(f"a.{i}", i, phase=Phase.LOSS) for i in (2, 3)]
    parts = module("a", leaf(0), leaf(1)), module("loss", leaf(2), leaf(3))
    assert grow_tree([*calls, *losses]) == module("", *parts)


@pytest.mark.parametrize(
    ("apart", "marks", "copies"),
    [
        ({4}, set(), [("h.0", "h.1"), ("h.2",), ("h.3",)]),
        (set(), {0}, [("h.0",), ("h.1", "h.2", "h.3")]),
    ],
)
def test_blocks_that_are_kept_apart_or_marked_otherwise_are_not_folded(
    apart: set[int], marks: set[int], copies: list[tuple[str, ...]]
) -> None:
    (h,) = fold(BLOCKS, apart, marks).children
    assert isinstance(h, Tree)
    assert [child.names for child in h.children if isinstance(child, Tree)] == copies


@pytest.mark.parametrize(
    "change",
    [{"shape": (8, 17)}, {"dtype": "bfloat16"}, {"target": "conv"}, {"inputs": (3,)}],
    ids=str,
)
def test_another_shape_dtype_call_or_wiring_is_no_identical_block(
    change: dict[str, object],
) -> None:
    nodes: list[NodeRow] = [*make_chain(BLOCKS).nodes]
    nodes[5] = dataclasses.replace(nodes[5], **change)
    (h,) = fold_repeats(grow_tree(nodes), nodes, lambda _: None).children
    assert isinstance(h, Tree)
    copies = [child.names for child in h.children if isinstance(child, Tree)]
    assert copies == [("h.0", "h.1"), ("h.2",), ("h.3",)]


def test_a_segment_is_a_block_in_each_module_that_it_reaches_into() -> None:
    tree = wrap_segments(grow("a.p", "a.q", "x", "b.p", "b.q"), [("1", range(1, 4))])
    segment = [Tree(Kind.SEGMENT, ("1",), (leaf(node),)) for node in range(5)]
    assert tree == module(
        "", module("a", leaf(0), segment[1]), segment[2], module("b", segment[3], leaf(4))
    )

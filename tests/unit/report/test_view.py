from __future__ import annotations

import dataclasses

import networkx
import pytest
from hand_made import make_analysis, memory_graphs
from hand_made_plans import make_plan
from hypothesis import given, settings
from pictures import MIB, make_chain, make_document, make_row, outline

from fxmem.errors import UsageError
from fxmem.graph import MemoryGraph
from fxmem.planning.plan import DelPoint, InplaceChange, Segment
from fxmem.report.graph.tree import Detail
from fxmem.report.graph.view import Box, Edge, GraphView, build_view, lay_plan, list_boxes

BLOCKS = [f"h.{block}.{name}" for block in range(4) for name in ("norm", "linear")]


def find_box(view: GraphView, title: str) -> Box:
    (box,) = (box for box in list_boxes(view.children) if box.title == title)
    return box


class TestBytes:
    def test_an_edge_has_the_bytes_of_the_storages_that_it_hands_on(self) -> None:
        rows = [make_row("a", 0), make_row("b", 1, [0]), make_row("c", 2, [0, 1])]
        rows[0] = dataclasses.replace(rows[0], results=(0, 2))
        rows[1] = dataclasses.replace(rows[1], results=(0,))  # a view
        assert build_view(make_document(rows)).edges == (
            Edge("box_0", "box_1", (MIB, MIB), 1.0, is_backward=False),
            Edge("box_0", "box_2", (MIB, MIB), 1.0, is_backward=False),
            Edge("box_1", "box_2", (MIB,), 0.5, is_backward=False),
        )

    def test_an_item_folded_twice_is_counted_within_what_is_around_it(self) -> None:
        names = [
            f"h.{i}.{name}" for i in range(3) for name in ("a", "g.0.p", "g.0.q", "g.1.p", "g.1.q")
        ]
        (outer,) = build_view(make_chain(names)).children
        inner = outer.children[1]
        assert (outer.copies, inner.copies, len(inner.names)) == (3, 2, 6)
        cut = build_view(make_chain(names), detail=Detail(depth=2))
        box = find_box(cut, "h.0.g.0 ... h.2.g.1")
        assert (box.copies, len(box.rows[0]), box.list_bytes("output")) == (2, 2, (2 * MIB,) * 6)


class TestCutting:
    names = ("x", "a.p", "a.q.r", "a.q.s", "b.p", "b.q")

    def test_a_module_that_is_not_opened_is_a_box(self) -> None:
        view = build_view(make_chain(self.names), detail=Detail(depth=1))
        assert outline(view.children) == ["x", "a", "b"]
        box = find_box(view, "a")
        assert (len(box.rows[0]), box.list_bytes("output"), box.is_module) == (3, (3 * MIB,), True)
        assert [(e.tail, e.head, e.nbytes) for e in view.edges] == [
            ("box_0", "box_1", (MIB,)),
            ("box_1", "box_2", (MIB,)),
        ]

    def test_by_default_as_many_as_can_be_read_and_all_around_the_peak(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fxmem.report.graph.view.AIM_BOXES", (5, 5))
        view = build_view(make_chain(self.names, peak="a.q.s"))
        assert outline(view.children) == [
            "x",
            ("module", "a", 1, ["p", ("module", "a.q", 1, ["r", "s"])]),
            "b",
        ]

    def test_views_that_follow_from_each_other_are_one_box(self) -> None:
        rows = [
            make_row("linear", 0),
            *(
                make_row(n, 0, [i], output_bytes=0, results=(0,))
                for i, n in enumerate(["view", "transpose", "reshape"])
            ),
        ]
        rows.append(make_row("relu", 1, [3]))
        view = build_view(make_document(rows))
        assert outline(view.children) == ["linear", "view, transpose, reshape", "relu"]
        assert outline(build_view(make_document(rows), detail=Detail(expand=True)).children) == [
            row.name for row in rows
        ]

    def test_nodes_that_hold_next_to_nothing_are_one_box_wherever_their_inputs_are_from(
        self,
    ) -> None:
        rows = [make_row("x", 0), *(make_row(f"i{i}", i, output_bytes=64) for i in range(1, 4))]
        rows += [make_row("view_a", 0, [0], output_bytes=0, results=(0,)), make_row("y", 5, [4])]
        rows += [make_row("view_b", 5, [5], output_bytes=0, results=(5,))]
        rows += [make_row("view_c", 0, [0], output_bytes=0, results=(0,))]
        # Views of large results follow from each other, or are boxes of their own.
        assert outline(build_view(make_document(rows)).children) == [
            *("x", "i1, i2, i3", "view_a", "y", "view_b", "view_c")
        ]
        at_peak = build_view(make_document(rows, peak="i2")).children
        assert outline(at_peak)[1:4] == ["i1", "i2", "i3"]

    def test_what_holds_most_is_opened_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [f"{module}.{module}{i}" for module in "abcd" for i in range(4)]
        document = make_chain(names)
        large = {"b": 2000 * MIB, "c": 600 * MIB}
        rows = [
            dataclasses.replace(row, live_bytes=large.get(row.fqn, 0)) for row in document.nodes
        ]
        document = dataclasses.replace(document, nodes=tuple(rows))
        for most, opened in (6, ""), (8, "b"), (10, "bc"), (25, "bc"), (26, "abc"):
            monkeypatch.setattr("fxmem.report.graph.view.AIM_BOXES", (most // 2, most))
            children = build_view(document).children
            assert "".join(c.names[0] for c in children if not isinstance(c, Box)) == opened

    def test_what_works_on_sizes_alone_is_left_out(self) -> None:
        size = make_row("size", 0, [0], shape=None, dtype=None, output_bytes=0, results=())
        view = build_view(make_document([make_row("x", 0), size, make_row("y", 1, [0, 1])]))
        assert (outline(view.children), view.notes) == (
            ["x", "y"],
            ("1 operation on sizes is left out.",),
        )

    def test_a_first_level_of_too_many_boxes_is_refused(self) -> None:
        with pytest.raises(UsageError) as caught:
            build_view(make_chain([f"n{i}" for i in range(1_001)]))
        assert str(caught.value).startswith("the graph has 1001 boxes at its first level, more")

    def test_what_was_asked_for_and_is_too_much_is_cut_and_says_so(self) -> None:
        names = [f"m{i}.n{j}" for i in range(10) for j in range(200 + i)]
        view = build_view(make_chain(names), detail=Detail(expand=True))
        assert outline(view.children) == [f"m{i}" for i in range(10)]
        assert view.notes == ("Cut to a depth of 1: more than 1000 boxes otherwise.",)


class TestPlan:
    plan = make_plan(
        segments=(
            Segment("h.0.linear", "h.1.norm", 2, children=(Segment("h.1.norm", "h.1.norm", 1),)),
        ),
        inplace=(InplaceChange("h.2.norm", "relu_"),),
        dels=(DelPoint("h.0.norm", "x", "h.3.linear"), DelPoint("h.0.linear", "", "h.3.linear")),
    )

    def view(self, detail: Detail | None = None) -> GraphView:
        document = make_chain(BLOCKS)
        return build_view(document, lay_plan(self.plan, document.nodes), detail)

    def test_segments_are_boxes_around_what_is_computed_again(self) -> None:
        assert outline(self.view().children)[0][3][:2] == [
            ("module", "h.0", 1, ["norm", ("segment", "1", 1, ["linear"])]),
            (
                *("module", "h.1", 1),
                [("segment", "1", 1, [("segment", "1.1", 1, ["norm"])]), "linear"],
            ),
        ]

    def test_what_a_plan_changes_is_marked_and_told(self) -> None:
        boxes = {box.name: (box.is_again, box.notes) for box in list_boxes(self.view().children)}
        assert boxes["h.0.linear"] == (True, ("recomputed",))
        assert boxes["h.2.norm"] == (False, ("in place: relu_",))
        assert boxes["h.3.linear"] == (False, ("then del x", "then del h.0.linear"))
        assert boxes["h.0.norm"] == (False, ())


# -- as a networkx.DiGraph -------------------------------------------------------------------------


def test_nodes_have_their_memory_and_edges_the_storages_that_flow() -> None:
    graph = make_analysis().to_networkx()
    assert graph.graph == {
        "model": "nets/net.py:Net",
        "peak_bytes": 30 * MIB + 4,
        "phase": "backward",
    }
    assert list(graph.edges) == [("fc1", "block.relu")]
    relu = graph.nodes["block.relu"]
    assert (relu["target"], relu["shape"], relu["dtype"]) == ("relu", (8, 1024), "float32")
    assert relu["source"] == "/home/me/nets/net.py:12"
    assert (relu["saved_bytes"], relu["live_at_peak_bytes"]) == (4 * MIB, 12 * MIB)
    assert [name for name, is_peak in graph.nodes(data="is_peak") if is_peak] == ["block.relu"]


@settings(max_examples=20)
@given(memory_graphs())
def test_any_graph_is_acyclic_and_has_every_node(graph: MemoryGraph) -> None:
    digraph = make_analysis(graph).to_networkx()
    assert list(digraph) == [node.name for node in graph.nodes]
    assert networkx.is_directed_acyclic_graph(digraph)

"""Whatever names a model, a file or a plan has, a picture of it is a picture."""

from __future__ import annotations

import json
import re

import pytest
from drawings import ENGINES, HARMLESS, draw_with, list_elements, list_texts
from hand_made import make_analysis, memory_graphs
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pictures import make_chain

from fxmem.graph import MemoryGraph, SourceLocation
from fxmem.report.document import build_document
from fxmem.report.graph.dot import build_picture
from fxmem.report.graph.tree import Detail
from fxmem.report.graph.view import build_view, list_boxes
from fxmem.report.tables import escape_controls

HOSTILE = st.text(
    st.sampled_from("\"'<>\\&;#nlrNGETL{}|[]-\n\t\x00 \x1b.é卷𝛼\u202e\ud800x0"), max_size=12
)
DETAILS = st.builds(Detail, st.none() | st.integers(1, 4), st.booleans())


@pytest.mark.parametrize("engine", ENGINES)
@given(st.lists(HOSTILE, min_size=1, max_size=4), HOSTILE)
@example(['"];x [label="'], "<script>alert(1)</script>")
@example(["<b>bold</b>", r"\N\G", "a\\", "&lt;&#60;"], '"/><script/>')
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_neither_breaks_nor_adds_to_a_picture(
    engine: str, names: list[str], target: str
) -> None:
    names = [f"{name}{index}" for index, name in enumerate(names)]
    source = SourceLocation(f"/home/{target}.py", 3)
    document = make_chain(names, peak=names[0], target=target, source=source, fqn="")
    view = build_view(document, detail=Detail(expand=True))
    dot = build_picture(view).source
    drawn = json.loads(draw_with(engine, dot, "dot_json"))
    there = {entry["name"] for entry in drawn["objects"]}
    assert {name for name in there if not re.fullmatch(r"legend_\d|cluster_legend", name)} == {
        f"box_{index}" for index in range(len(names))
    }
    svg = draw_with(engine, dot, "svg")
    assert {element.tag for element in list_elements(svg)} <= HARMLESS
    texts = list_texts(svg)
    for name in names:
        # Graphviz leaves out the spaces around a line in some versions.
        assert escape_controls(name).strip() in [text.strip() for text in texts]


@settings(max_examples=50)
@given(memory_graphs(), DETAILS)
def test_every_node_is_in_one_box_or_left_out(graph: MemoryGraph, detail: Detail) -> None:
    document = build_document(make_analysis(graph))
    view = build_view(document, detail=detail)
    nodes = [row.index for box in list_boxes(view.children) for copy in box.rows for row in copy]
    assert sorted(nodes) == list(range(len(graph.nodes)))
    keys = [box.key for box in list_boxes(view.children)]
    assert len(set(keys)) == len(keys)
    assert {end for edge in view.edges for end in (edge.tail, edge.head)} <= set(keys)
    assert sum(sum(box.list_bytes("live")) for box in list_boxes(view.children)) == sum(
        row.live_bytes for row in document.nodes
    )


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab")), max_size=30),
    DETAILS,
)
def test_folding_and_cutting_lose_no_bytes(
    path: list[tuple[int, int, str]], detail: Detail
) -> None:
    names = [f"m{i}.{j}.{name}" for i, j, name in path]
    view = build_view(make_chain(names), detail=detail)
    nodes = [row.index for box in list_boxes(view.children) for copy in box.rows for row in copy]
    assert sorted(nodes) == list(range(len(names)))
    assert build_picture(view).source

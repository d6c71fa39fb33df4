from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from drawings import ENGINES, draw_with, list_texts
from hand_made import make_analysis
from hand_made_plans import make_plan
from pictures import make_chain

from fxmem.planning.plan import InplaceChange, Segment
from fxmem.report.cutting import Detail
from fxmem.report.document import build_document
from fxmem.report.dot import write_dot
from fxmem.report.graph_view import build_view
from fxmem.report.overlay import lay_plan

BLOCKS = [f"h.{block}.{name}" for block in range(4) for name in ("norm", "linear")]


def test_the_picture_of_the_step_made_by_hand(check_golden: Callable[[str, str], None]) -> None:
    check_golden("hand_made.dot", write_dot(build_view(build_document(make_analysis()))))


def test_a_folded_block_and_a_module_that_is_not_opened(
    check_golden: Callable[[str, str], None],
) -> None:
    document = make_chain([*BLOCKS, "head.norm", "head.linear"], peak="head.linear")
    check_golden("folded.dot", write_dot(build_view(document)))
    check_golden("cut.dot", write_dot(build_view(document, detail=Detail(depth=1))))


def test_a_plan_over_a_picture(check_golden: Callable[[str, str], None]) -> None:
    document = make_chain(BLOCKS)
    plan = make_plan(
        segments=(Segment("h.0.linear", "h.1.norm", 2),),
        inplace=(InplaceChange("h.2.norm", "relu_"),),
        dels=(),
    )
    check_golden("plan.dot", write_dot(build_view(document, lay_plan(plan, document.nodes))))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_draws_the_same_boxes_and_lines(engine: str) -> None:
    dot = write_dot(build_view(build_document(make_analysis())))
    drawn = json.loads(draw_with(engine, dot, "dot_json"))
    names = [entry["name"] for entry in drawn["objects"]]
    assert sorted(n for n in names if n.startswith("box")) == [f"box_{i}" for i in range(5)]
    texts = list_texts(draw_with(engine, dot, "svg"))
    for line in ("PEAK: 30.00 MiB in backward", "block.relu", "output 4.00 MiB, saves 4.00 MiB"):
        assert line in texts
    assert "Peak 30.00 MiB in backward of block.relu, net.py:12" in texts


def test_the_search_for_places_ends_early_in_a_large_picture() -> None:
    names = [f"n{index}" for index in range(402)]
    assert "nslimit" in write_dot(build_view(make_chain(names)))
    assert "nslimit" not in write_dot(build_view(make_chain(names[:401])))


def test_a_box_is_as_wide_as_letters_whose_width_an_engine_does_not_know() -> None:
    dot = write_dot(build_view(make_chain(["卷" * 20])))
    assert 'width="3.60"' in dot
    assert "width=" not in write_dot(build_view(make_chain(["conv"]))).replace("penwidth=", "")


def test_a_peak_that_no_operation_has_is_in_the_title_alone() -> None:
    dot = write_dot(build_view(make_chain(["a", "b"])))
    assert "Peak 64.00 MiB in backward" in dot
    assert "PEAK" not in dot

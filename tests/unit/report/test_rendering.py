from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import make_analysis
from hand_made_plans import make_plan

from fxmem.errors import UsageError
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.plan import Segment
from fxmem.report.rendering import (
    FORMATS,
    check_format,
    choose_options,
    find_format,
    render,
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.dot", "dot"), ("b/A.GV", "dot"), (Path("c.png"), "png"), ("d.pdf", "pdf")],
)
def test_the_format_is_that_of_the_suffix(path: str | Path, kind: str) -> None:
    assert find_format(path) == kind


def test_no_suffix_is_that_of_two_formats() -> None:
    suffixes = [suffix for entry in FORMATS.values() for suffix in entry.suffixes]
    for suffix in suffixes:
        assert [other for other in suffixes if suffix.endswith(other)] == [suffix]


@pytest.mark.parametrize("path", ["peak", "peak.bmp", ".svg/peak"])
def test_an_unknown_suffix_is_refused(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_format(path)
    name = path.rpartition("/")[2]
    assert caught.value.cause == f"what to draw in {name!r} is not known by its suffix"
    assert caught.value.hint.startswith(".dot, .svg, .png, .pdf")


def test_an_unknown_format_or_view_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        check_format("bmp")
    assert str(caught.value).startswith("there is no format 'bmp' (one of dot, svg, png, pdf")
    with pytest.raises(UsageError) as caught:
        check_format("dot", "sunset")
    assert str(caught.value) == "there is no view 'sunset' as dot (one of graph)"


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        choose_options("graph", 0, False)
    assert str(caught.value) == "a depth of 0 shows nothing (1 or more)"


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        make_analysis().to_dot(plan=make_plan())
    assert str(caught.value) == (
        "the plan was made for another model or other inputs (make it anew with fxmem plan -o)"
    )


def test_a_plan_lies_over_the_analysis_that_it_was_made_for() -> None:
    analysis = make_analysis()
    plan = make_plan(
        fingerprint=fingerprint_graph(analysis.graph),
        segments=(Segment("fc1", "block.relu", 2),),
    )
    dot = analysis.to_dot(plan=plan)
    assert 'label="checkpoint 1\\l' in dot
    assert "With the plan, the peak is 21.00 MiB; the figures are those without it." in dot


def test_an_analysis_draws_itself_by_the_suffix(tmp_path: Path) -> None:
    analysis = make_analysis()
    analysis.render(tmp_path / "peak.dot", depth=1)
    assert (tmp_path / "peak.dot").read_text(encoding="utf-8") == analysis.to_dot(depth=1)
    analysis.render(str(tmp_path / "peak.svg"))
    assert b"</svg>" in (tmp_path / "peak.svg").read_bytes()
    assert (
        analysis.to_dot(expand=True)
        == render(analysis, "dot", choose_options("graph", None, True)).decode()
    )


def test_what_cannot_be_drawn_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        make_analysis().render(tmp_path / "peak.svg", plan=make_plan())
    assert [*tmp_path.iterdir()] == []

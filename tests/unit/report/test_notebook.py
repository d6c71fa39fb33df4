"""Analyses, plans, fronts and verifications as they show themselves."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evil_names import EVIL, make_evil_analysis
from hand_made import make_analysis
from hand_made_plans import make_front, make_plan, make_verification

import fxmem
from fxmem.batching.largest import MaxBatch
from fxmem.planning.plan import Front, Plan
from fxmem.report.graph import engine

GPT = "examples/gpt.py:GPT(layers=2)"


@pytest.fixture(scope="module")
def analysis() -> fxmem.Analysis:
    return fxmem.analyze(GPT, "2x64:int64", optimizer="adamw")


def list_tags(page: str) -> set[str]:
    parser, tags = HTMLParser(), set[str]()
    parser.handle_starttag = lambda tag, _: tags.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    return tags


def show(value: Any) -> str:
    page: str = value._repr_html_()
    return page


def test_printed_is_the_report_and_repr_a_line(analysis: fxmem.Analysis) -> None:
    assert f"{analysis}\n" == analysis.to_text()
    assert repr(analysis) == (
        f"Analysis(model={GPT!r}, inputs=('2x64:int64',), mode='train', device='cuda', "
        f"peak_bytes={analysis.peak_bytes})"
    )
    assert repr(make_plan()) == (
        "Plan(baseline_peak_bytes=31457280, peak_bytes=22020096, overhead=0.25, mode='train', "
        "style='graph', segments=<2>, inplace=<1>, dels=<1>)"
    )
    assert repr(Front(make_front(5))) == "Front(<5 plans>, peak_bytes=<31457280 ... 27262464>)"
    assert repr(make_verification()).startswith("Verification(equal=True, keeps_promise=True, ")


def test_a_plan_and_a_front_show_their_step(analysis: fxmem.Analysis) -> None:
    front = fxmem.pareto(analysis, points=3, strategy="schedules")
    assert isinstance(front, tuple) and front[0] == front[:1][0]
    for value in (front, front[-1]):
        assert f"{GPT}; 2x64:int64; train; cuda; optimizer adamw" in str(value)
        page = show(value)
        assert list_tags(page) >= {"table", "img", "strong"}
        plot = base64.b64decode(re.findall(r"svg\+xml;base64,([^\"]*)", page)[0])
        assert b"added" in plot or b"with the plan" in plot
    assert "The new peak is in " in str(front[-1])


def test_a_plan_from_a_file_shows_what_it_knows() -> None:
    plan = Plan.from_json(make_plan().to_json())
    first, second, *_ = str(plan).splitlines()
    assert first.startswith("Peak 30.00 MiB -> 21.00 MiB (70.0 %)") and second == ""
    page = show(plan)
    assert "encoder.layers.11.attention" in page and "with the plan" in page
    assert "img" not in list_tags(page)


def test_an_analysis_shows_tables_the_timeline_its_modules_and_the_graph(
    analysis: fxmem.Analysis,
) -> None:
    page = show(analysis)
    assert list_tags(page) >= {"table", "img", "details", "svg", "polygon"}
    assert "<strong>Peak " in page and "2 x Block" in page and "PEAK" in page
    assert "optimizer_state" not in page and "<td>OPTIMIZER_STATE</td>" in page


def test_without_programs_that_draw_the_tables_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(engine.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    tags = list_tags(show(make_analysis()))
    assert "table" in tags and not tags & {"img", "svg"}


def test_a_verification_shows_its_figures() -> None:
    page = show(make_verification())
    assert "Equal bit for bit in 3 steps" in page and 'style="width: 66%"' in page


def test_the_largest_batch_shows_its_figures() -> None:
    axis, setup = "dimension 0 of input 0", make_analysis().setup
    found = MaxBatch(71, 3 << 30, 72, 4 << 30, "no room", 1, axis, 6 << 30, 0, 0, 5, setup)
    assert str(found).startswith("Largest batch 71, with a peak of 3.00 GiB\nnets/net.py:Net; ")
    assert repr(found).startswith("MaxBatch(batch=71, peak_bytes=3221225472, ")
    page = show(found)
    assert "no: no room" in page and 'style="width: 66%"' in page


def test_names_are_text_and_nothing_else() -> None:
    page = show(make_evil_analysis())
    allowed = list_tags(show(make_analysis()))
    assert list_tags(page) <= allowed
    for name in EVIL[:3]:
        assert name not in page
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in page

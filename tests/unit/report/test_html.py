from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evil_names import EVIL, make_evil_analysis
from hand_made import make_analysis
from hand_made_plans import make_front, make_plan

from fxmem.graph import Category
from fxmem.planning.plan import Segment, fingerprint_graph
from fxmem.report.formats import RenderOptions, render_as
from fxmem.report.graph import engine
from fxmem.report.html import read_script, read_style, write_html


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text in each kind."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self._last = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._last = tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._last, []).append(data)


def read_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_answer_is_there_without_the_script() -> None:
    page = write_html(make_analysis())
    told = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<h1>Peak 30.00 MiB in backward of block.relu, net.py:12</h1>" in told
    assert "nets/net.py:Net; 8x1024:float32; train; cpu; optimizer adam; loss default" in told
    # 12 of 30 MiB are parameters and their gradients: 8 and 4.
    assert re.search(r"<td>PARAMETER</td><td class=\"number\">8.00 MiB</td>.*?26.7 %", told)
    assert "<noscript>" in told


def test_nothing_is_loaded_from_anywhere() -> None:
    page = write_html(make_analysis(), make_plan(), make_front())
    elements = Elements(page)
    loading = {"src", "href", "srcset", "data", "action", "formaction", "poster", "background"}
    assert {(tag, value) for tag, name, value in elements.attributes if name in loading} == {
        ("a", "#alive")
    }
    assert not elements.tags.keys() & {"link", "img", "iframe", "object", "embed", "base", "form"}
    for text in (read_style(), read_script()):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|fetch\(", text)


def test_only_its_own_script_and_style_may_run() -> None:
    page = write_html(make_analysis())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    for name, tag in (("script-src", "<script>"), ("style-src", "<style>")):
        inside = page.split(tag)[1].split(tag.replace("<", "</"))[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert not re.search(r"<[^>]+ (style|on\w+)=", re.sub(r"<script.*?</script>", "", page))


@pytest.mark.parametrize("with_graph", [False, True])
def test_names_are_text_and_nothing_else(with_graph: bool) -> None:
    analysis = make_evil_analysis()
    plan = make_plan(
        fingerprint=fingerprint_graph(analysis.graph),
        segments=(Segment(EVIL[0], EVIL[1], 1, source=analysis.nodes[1].source),),
        inplace=(),
        dels=(),
    )
    plain = Elements(write_html(make_analysis(), make_plan(inplace=(), dels=())))
    svg = render_as(analysis, "svg", RenderOptions(None, None, True)) if with_graph else b""
    page = write_html(analysis, plan, (), svg)
    elements = Elements(page)
    drawn = {"svg", "g", "title", "path", "polygon", "polyline", "ellipse", "text"}
    assert elements.tags.keys() <= plain.tags.keys() | (drawn if with_graph else set())
    assert elements.tags["script"] == 2 and elements.tags["a"] == 1
    assert not [name for _, name, _ in elements.attributes if name.startswith("on")]
    assert EVIL[0] in "".join(elements.texts["td"])
    assert set(EVIL) <= set(elements.texts["li"])
    data = read_data(page)
    assert f"{EVIL[1]}1" in data["texts"]
    assert not re.search(r"[<>&\u2028\u2029]", page.split('id="data">')[1].split("</script>")[0])


def test_without_an_engine_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(engine.sysconfig, "get_path", lambda _: str(tmp_path))
    make_analysis().render(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<svg" not in page.split("<script")[0]
    assert "The graph is not drawn: no Graphviz that draws svg is installed (pip " in page


def test_what_cannot_be_told_of_a_plan_is_said() -> None:
    page = write_html(make_analysis(), make_plan())
    assert (
        "The peak falls from 30.00 MiB to <strong>21.00 MiB</strong>, for 25.0 % more time and "
        "10.0 % more FLOPs."
    ) in page
    assert "Can run in place: relu_ at block.relu." in page
    assert "Freed early: hidden after block.relu." in page
    assert "The timeline with the plan is not shown: that takes the model itself" in page
    assert "The trade-offs are not shown because they were not computed." in page
    assert 'id="overlay"' not in page and 'id="curve"' not in page


def test_every_category_has_its_colour() -> None:
    for category in Category:
        assert re.search(rf"--{category.value}: light-dark\(#\w+, #\w+\)", read_style())

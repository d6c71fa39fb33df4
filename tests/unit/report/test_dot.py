from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import graphviz
import pytest
from drawings import ENGINES, PURE, draw_with
from hand_made import make_analysis
from hand_made_plans import make_plan
from pictures import make_chain

from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.planning.plan import InplaceChange, Segment
from fxmem.report.document import Headline, build_document
from fxmem.report.graph import engine as engine_module
from fxmem.report.graph.dot import build_picture
from fxmem.report.graph.engine import draw_dot, find_engine, fit_texts
from fxmem.report.graph.tree import Detail
from fxmem.report.graph.view import GraphView, build_view, lay_plan


def draw(view: GraphView) -> str:
    return build_picture(view).source


BLOCKS = [f"h.{block}.{name}" for block in range(4) for name in ("norm", "linear")]


def test_the_picture_of_the_step_made_by_hand(check_golden: Callable[[str, str], None]) -> None:
    check_golden("hand_made.dot", draw(build_view(build_document(make_analysis()))))


def test_a_folded_block_and_a_module_that_is_not_opened(
    check_golden: Callable[[str, str], None],
) -> None:
    document = make_chain([*BLOCKS, "head.norm", "head.linear"], peak="head.linear")
    check_golden("folded.dot", draw(build_view(document)))
    check_golden("cut.dot", draw(build_view(document, detail=Detail(depth=1))))


def test_a_plan_over_a_picture(check_golden: Callable[[str, str], None]) -> None:
    document = make_chain(BLOCKS)
    plan = make_plan(
        segments=(Segment("h.0.linear", "h.1.norm", 2),),
        inplace=(InplaceChange("h.2.norm", "relu_"),),
        dels=(),
    )
    check_golden("plan.dot", draw(build_view(document, lay_plan(plan, document.nodes))))


def test_a_peak_in_the_optimizer_has_a_mark_of_its_own() -> None:
    document = make_chain(["a", "b"])
    names = tuple(f"p{i}" for i in range(3))
    headline = Headline(3 << 30, Phase.OPTIMIZER, None, None, "adamw", names)
    source = draw(build_view(dataclasses.replace(document, headline=headline)))
    lines = r"PEAK: 3.00 GiB\nin the optimizer step of adamw,\nupdating 3 parameters together\n"
    assert f'peak [label="{lines}"' in source and "box_1 -> peak [style=invis]" in source
    assert "peak [" not in draw(build_view(make_chain(["a", "b"], peak="b")))


def test_texts_of_frames_and_arrows_lie_above_the_arrows() -> None:
    dot = 'digraph { subgraph cluster_1 { label="the frame" a } b -> a [label="the arrow"] }'
    svg = draw_dot(dot, "svg").decode()
    last = svg.rindex('class="edge"')
    assert last < svg.rindex('paint-order="stroke"') < svg.index("the frame")
    assert svg.count("the frame") == svg.count("the arrow") == 1
    assert svg.index("the arrow") > last and svg.index(">a<") < svg.rindex('paint-order="stroke"')


def test_the_search_for_places_ends_early_in_a_large_picture() -> None:
    names = [f"n{index}" for index in range(402)]
    assert "nslimit" in draw(build_view(make_chain(names)))
    assert "nslimit" not in draw(build_view(make_chain(names[:401])))


def test_a_picture_shows_itself_in_a_notebook_and_draws_files(tmp_path: Path) -> None:
    picture = make_analysis().to_graphviz(depth=1)
    assert isinstance(picture, graphviz.Digraph)
    assert picture.source == make_analysis().to_graphviz(depth=1).source
    assert "</svg>" in picture._repr_mimebundle_()["image/svg+xml"]
    drawn = Path(picture.render("step", tmp_path, format="png", cleanup=True))
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.iterdir()] == [drawn]


@pytest.mark.parametrize("engine", ENGINES)
def test_texts_have_the_length_that_they_were_laid_out_with(engine: str) -> None:
    text = "".join(map(chr, range(33, 127))).replace("\\", "").replace('"', "")
    dot = (
        f'digraph {{ node [shape=box, fontname=Arial, fontsize=11, margin=0]; a [label="{text}"] }}'
    )
    svg = fit_texts(draw_with(engine, dot, "svg"))
    (length,) = re.findall(rb'textLength="([0-9.]+)"', svg)
    (points,) = re.findall(rb'<polygon fill="none" stroke="black" points="([^"]+)"', svg)
    xs = [float(pair.split(b",")[0]) for pair in points.split()]
    room = max(xs) - min(xs)  # the system's Graphviz measures the fonts that are installed
    assert float(length) <= room + 0.5
    assert engine != PURE or float(length) > 0.98 * room


DOT = "digraph { a -> b }"


@pytest.fixture
def hide_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only what is put into the folder is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine_module.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def put_program(folder: Path, name: str, code: str) -> str:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_systems_graphviz_comes_before_the_one_beside_python(hide_engines: Path) -> None:
    pure = put_program(hide_engines, "graphviz-pure", "")
    assert find_engine("svg") == find_engine("png") == pure
    system = put_program(hide_engines, "dot", "")
    assert find_engine("svg") == find_engine("png") == find_engine("pdf") == system


@pytest.mark.usefixtures("hide_engines")
@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("svg", "pip install graphviz-pure, or write the graph itself: -o FILE.dot"),
        ("pdf", "apt install graphviz, or draw an .svg"),
    ],
)
def test_without_graphviz_the_error_says_what_to_install(kind: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, kind)
    assert str(caught.value) == f"no Graphviz that draws {kind} is installed ({hint})"


def test_an_engine_that_fails_is_told_in_its_own_words(hide_engines: Path) -> None:
    path = put_program(
        hide_engines, "graphviz-pure", "import sys; print('out of ink', file=sys.stderr); exit(3)"
    )
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert str(caught.value) == (f"{path} fails: out of ink (write the graph itself: -o FILE.dot)")


def test_an_engine_that_takes_too_long_is_stopped(
    hide_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(hide_engines, "graphviz-pure", "import time; time.sleep(60)")
    monkeypatch.setattr(engine_module, "TIME_LIMIT_S", 0.1)
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert str(caught.value) == (
        "Graphviz did not lay out the graph within 0.1 seconds (draw less of it: --depth 2)"
    )

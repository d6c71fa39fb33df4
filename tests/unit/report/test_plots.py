"""Plots of a timeline and of trade-offs, read again from their SVG."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pytest
from drawings import SVG
from hand_made import MIB, make_analysis, make_graph, memory_graphs
from hand_made_plans import make_front, make_plan
from hypothesis import given, settings

from fxmem.errors import UsageError
from fxmem.graph import Category, MemoryGraph, Operation, Phase
from fxmem.report.categories import STYLES
from fxmem.report.plots import (
    draw_timeline,
    draw_tradeoff,
    fit_phases,
)

STARTS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


def list_texts(svg: bytes) -> list[str]:
    return [t for e in ElementTree.fromstring(svg).iter(f"{SVG}text") for t in e.itertext() if t]


def test_a_timeline_has_the_answer_the_phases_and_what_is_alive_at_the_peak() -> None:
    texts = list_texts(draw_timeline(make_analysis(), "svg"))
    assert texts.count("nets/net.py:Net") == 1
    assert "Peak 30.00 MiB in backward of block.relu, net.py:12" in texts
    assert "peak 30.00 MiB" in texts
    assert [t for t in texts if t in list(Phase)] == ["forward", "loss", "backward", "optimizer"]
    start = texts.index("alive at the peak") + 1
    assert sorted(texts[start : start + 9]) == [
        *("activation 4.00 MiB", "buffer 1.00 MiB", "gradient 4.00 MiB", "input 2.00 MiB"),
        *("optimizer state 2.00 MiB", "output 1.00 MiB", "parameter 8.00 MiB"),
        *("temporary 4.00 MiB", "workspace 4.00 MiB"),
    ]


def test_areas_differ_in_more_than_colour() -> None:
    assert set(STYLES) == set(Category)
    # Plots leave out dots: two areas are plain, and never next to each other.
    hatches = [style.hatch.replace(".", "") for style in STYLES.values()]
    plain = [at for at, hatch in enumerate(hatches) if not hatch]
    assert len(plain) == 2 and plain[1] - plain[0] > 1
    assert len({style.hatch for style in STYLES.values()}) == len(Category)
    assert draw_timeline(make_analysis(), "svg").count(b"<pattern") >= 7


def test_the_plan_is_a_line_with_its_own_peak() -> None:
    analysis, plan = make_analysis(), make_plan()
    without_line = draw_timeline(analysis, "svg", plan)
    texts = list_texts(without_line)
    assert {"with the plan 21.00 MiB", "30% less, 25.0% more time"} <= set(texts)
    with_line = draw_timeline(analysis, "svg", plan, analysis)
    assert list_texts(with_line) == texts
    assert len(without_line) < len(with_line)


@pytest.mark.parametrize("kind", STARTS)
def test_the_same_plot_is_the_same_file(kind: str) -> None:
    analysis, front = make_analysis(), make_front()
    for draw in (
        lambda: draw_timeline(analysis, kind, make_plan(), analysis),
        lambda: draw_tradeoff(analysis, kind, front, front[1]),
    ):
        drawn = draw()
        assert drawn.startswith(STARTS[kind])
        with matplotlib.rc_context({"font.size": 20.0, "axes.grid": True}):  # a user's style
            assert draw() == drawn
        assert not re.search(rb"20\d\d-\d\d-\d\d", drawn)


def test_names_are_text_whatever_they_hold() -> None:
    name = "<b>&\"' $x_1$ \x1b[2J \\frac{1}"
    nodes = tuple(replace(node, name=f"{name}{node.index}") for node in make_graph().nodes)
    analysis = make_analysis(replace(make_graph(), nodes=nodes), model=name)
    for svg in (draw_timeline(analysis, "svg"), draw_tradeoff(analysis, "svg", make_front())):
        assert list_texts(svg).count("<b>&\"' $x_1$ \\x1b[2J \\frac{1}") == 1
    assert draw_timeline(make_analysis(model="模型" * 90), "png").startswith(STARTS["png"])


@settings(max_examples=5)
@given(memory_graphs())
def test_any_step_can_be_plotted(graph: MemoryGraph) -> None:
    analysis = make_analysis(graph)
    ElementTree.fromstring(draw_timeline(analysis, "svg", make_plan(), analysis))
    ElementTree.fromstring(draw_tradeoff(analysis, "svg", make_front(2)))


def test_phases_of_the_planned_step_begin_where_those_of_the_step_do() -> None:
    def make(*counts: int) -> list[Operation]:
        *_, forward, loss, backward, optimizer = Phase
        steps = forward, loss, backward, optimizer
        phases = [p for p, n in zip(steps, counts, strict=True) for _ in range(n)]
        return [Operation(index, "a", phase) for index, phase in enumerate(phases)]

    assert fit_phases(make(1, 1, 4, 1), make(1, 1, 2, 1)) == (
        *(0.5, 1.5),
        *(2.25, 2.75, 3.25, 3.75),
        4.5,
    )
    twice = [*make(1, 0, 1, 0), *(replace(o, index=o.index + 2) for o in make(1, 0, 1, 0))]
    assert fit_phases(twice, twice) == (0.5, 1.5, 2.5, 3.5)


def test_a_front_has_its_ends_and_the_chosen_plan() -> None:
    front = tuple(
        replace(p, peak_bytes=p.peak_bytes - index * 5 * MIB)
        for index, p in enumerate(make_front(4))
    )
    texts = list_texts(draw_tradeoff(make_analysis(), "svg", front, front[1]))
    assert "Peak 30.00 MiB; with the plan 24.00 MiB for 4.0% more time" in texts
    assert "without a plan 30.00 MiB" in texts
    assert "chosen 24.00 MiB, 4.0% more time" in texts
    texts = list_texts(draw_tradeoff(make_analysis(), "svg", front))
    assert "Peak 30.00 MiB; down to 12.00 MiB for 12.0% more time" in texts
    assert not any(text.startswith("chosen") for text in texts)
    with pytest.raises(UsageError) as caught:
        draw_tradeoff(make_analysis(), "svg", ())
    assert str(caught.value) == "there are no trade-offs to draw (front=fxmem.pareto(analysis))"

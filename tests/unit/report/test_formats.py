from __future__ import annotations

import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import make_analysis
from hand_made_plans import make_plan
from measuring.snapshots import replay_forwards
from torch import nn

import fxmem
from fxmem.errors import UsageError
from fxmem.report.graph import engine
from fxmem.report.plots import draw_timeline, draw_tradeoff


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        make_analysis().to_graphviz(plan=make_plan())
    assert str(caught.value) == (
        "the plan was made for another model or other inputs (make a new one with fxmem plan -o)"
    )


@pytest.fixture(scope="module")
def step() -> fxmem.Analysis:
    """On the CPU, where requests are blocks and viewers show the peak itself."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    return fxmem.analyze(nn.Sequential(*layers), ("512x64",), device="cpu")


@pytest.fixture(scope="module")
def front(step: fxmem.Analysis) -> tuple[fxmem.Plan, ...]:
    return fxmem.pareto(step)


def test_snapshots_and_plots_are_of_the_step_with_the_plan(
    step: fxmem.Analysis, front: tuple[fxmem.Plan, ...], tmp_path: Path
) -> None:
    plan = front[-1]
    assert plan.peak_bytes < step.peak_bytes
    for path, chosen, peak in (
        ("a.pickle", None, step.peak_bytes),
        ("b.pickle", plan, plan.peak_bytes),
        ("c.pickle", front[0], front[0].peak_bytes),
    ):
        step.render(tmp_path / path, plan=chosen)
        assert max(replay_forwards(pickle.loads((tmp_path / path).read_bytes()))) == peak
    planned = plan.find_step(step)
    assert planned is not None
    step.render(tmp_path / "a.svg", view="timeline", plan=plan)
    assert (tmp_path / "a.svg").read_bytes() == draw_timeline(step, "svg", plan, planned)
    step.render(tmp_path / "b.svg", view="tradeoff", plan=plan, front=front)
    assert (tmp_path / "b.svg").read_bytes() == draw_tradeoff(step, "svg", front, plan)


def test_a_plan_whose_step_has_another_peak_is_refused_where_the_step_is_asked_for(
    step: fxmem.Analysis, front: tuple[fxmem.Plan, ...], tmp_path: Path
) -> None:
    plan = replace(front[-1], peak_bytes=front[-1].peak_bytes - 1)
    with pytest.raises(UsageError) as caught:
        step.render(tmp_path / "a.pickle", plan=plan)
    assert str(caught.value) == (
        "the step with this plan does not have the plan's peak "
        "(make the plan again with this version of fxmem)"
    )
    for view in "timeline", "tradeoff":
        with pytest.raises(UsageError, match="the plan was made for another model"):
            make_analysis().render(tmp_path / "a.svg", view=view, plan=plan, front=front)
    assert [*tmp_path.iterdir()] == []


def test_plots_need_matplotlib_and_no_graphviz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_engine", lambda kind: pytest.fail("asks for Graphviz"))
    make_analysis().render(tmp_path / "a.svg", view="timeline")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib is not installed"):
        make_analysis().render(tmp_path / "b.svg", view="timeline")
    make_analysis().render(tmp_path / "c.pickle")


def test_pictures_are_of_steps_and_reports_of_any_result(tmp_path: Path) -> None:
    fxmem.render(make_plan(), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<title>Peak 30.00 MiB -&gt; 21.00 MiB (70.0 %)" in page
    for path, options, cause in (
        ("plan.pickle", {}, "pickle is for a step"),
        ("plan.html", {"plan": make_plan()}, "a plan is for a step"),
    ):
        with pytest.raises(UsageError, match=f"{cause}, not for this result"):
            fxmem.render(make_plan(), tmp_path / path, **options)
    with pytest.raises(UsageError, match=r"unknown output format '\.bmp'"):
        fxmem.render(make_plan(), "plan.bmp")

"""`fxmem render` around an analysis that is made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hand_made import make_analysis
from hand_made_plans import make_front, make_plan

import fxmem
from fxmem.cli import main
from fxmem.planning.plan import Segment, fingerprint_graph
from fxmem.report.graph import engine
from fxmem.report.plots import draw_tradeoff

COMMAND = ["render", "nets/net.py:Net", "--input", "8x1024"]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces fxmem.analyze; the options that it got."""
    calls: list[dict[str, Any]] = []

    def analyze(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return make_analysis()

    monkeypatch.setattr(fxmem, "analyze", analyze)
    return calls


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(make_analysis().to_json())
    return path


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.strip()


def test_without_a_file_stdout_is_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    assert capsys.readouterr() == (make_analysis().to_graphviz().source, "")


def test_the_suffix_of_the_file_says_how(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    assert main([*COMMAND, "--optimizer", "adam", "-o", str(tmp_path / "a.svg")]) == 0
    assert b"</svg>" in (tmp_path / "a.svg").read_bytes()
    assert main([*COMMAND, "-o", str(tmp_path / "a.PNG")]) == 0
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert calls[0]["optimizer"] == "adam"


def test_the_format_comes_before_the_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "-o", str(tmp_path / "a.txt"), "--format", "DOT"]) == 0
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == make_analysis().to_graphviz().source
    assert main([*COMMAND, "--format", "dot", "--depth", "1", "--expand"]) == 0
    assert capsys.readouterr().out == make_analysis().to_graphviz(depth=1, expand=True).source


def test_a_saved_report_is_drawn_without_the_model(
    report: Path, calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", str(report)]) == 0
    assert (capsys.readouterr().out, calls) == (make_analysis().to_graphviz().source, [])


def test_a_plan_is_laid_over_it(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = make_analysis()
    plan = make_plan(
        fingerprint=fingerprint_graph(analysis.graph), segments=(Segment("fc1", "fc1", 1),)
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert main(["render", str(report), "--plan", str(path)]) == 0
    assert capsys.readouterr().out == analysis.to_graphviz(plan=plan).source


def test_the_command_works_out_the_trade_offs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fxmem, "pareto", lambda analysis, **_: make_front())
    path = tmp_path / "a.svg"
    assert main([*COMMAND, "--view", "tradeoff", "-o", str(path)]) == 0
    assert path.read_bytes() == draw_tradeoff(make_analysis(), "svg", make_front())


def test_a_saved_report_does_not_say_what_plans_need(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan().to_json())
    timeline = ["--view", "timeline", "-o", str(tmp_path / "a.svg")]
    assert main(["render", str(report), *timeline]) == 0
    for arguments in (
        ["--view", "tradeoff", "-o", "a.svg"],
        [*timeline, "--plan", str(plan)],
        ["--plan", str(plan), "-o", "a.pickle"],
    ):
        assert fail(capsys, "render", str(report), *arguments) == (
            f"fxmem: error: {report} is a saved report, which lacks what this needs "
            "(name the model instead)"
        )


def test_without_graphviz_nothing_is_analysed_and_no_file_is_left(
    tmp_path: Path,
    calls: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(engine.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "no Graphviz that draws svg" in fail(capsys, *COMMAND, "-o", str(tmp_path / "a.svg"))
    assert (calls, [*tmp_path.iterdir()]) == ([], [])
    assert main([*COMMAND, "-o", str(tmp_path / "a.dot")]) == 0


def test_options_of_a_step_are_not_for_a_report(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, option in ((["--input", "3"], "input"), (["--size-hint", "4"], "size-hint")):
        assert fail(capsys, "render", str(report), *arguments) == (
            f"fxmem: error: {report} is a saved report: --{option} is for a model (leave it out)"
        )


def test_a_page_tells_the_trade_offs_of_a_step_with_a_plan(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fxmem, "pareto", lambda analysis, **how: asked.append(how) or make_front())
    plan, page = tmp_path / "plan.json", tmp_path / "a.html"
    fingerprint = fingerprint_graph(make_analysis().graph)
    made = make_plan(fingerprint=fingerprint, segments=(Segment("fc1", "fc1", 1),), dels=())
    plan.write_text(made.to_json())
    told = "Plans, cheapest first"
    for arguments, is_told in (
        ([*COMMAND, "--plan", str(plan)], True),
        (COMMAND, False),
        (["render", str(report), "--plan", str(plan)], False),
    ):
        assert main([*arguments, "-o", str(page)]) == 0
        assert (told in page.read_text(encoding="utf-8")) is is_told
    assert asked == [{"style": "graph", "strategy": None}]

"""`fxmem plan` around an analysis and plans that are made by hand."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hand_made import make_analysis
from hand_made_plans import make_front, make_plan

import fxmem
from fxmem.advice.memory_budgets import MemoryBudget, MemoryBudgets
from fxmem.cli import main
from fxmem.errors import InfeasibleError
from fxmem.finding import Finding
from fxmem.planning import planner
from fxmem.planning.plan import Front, Plan
from fxmem.units import format_bytes

COMMAND = ["plan", "nets/net.py:Net"]
ONE = [*COMMAND, "--budget", "24MiB"]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces what analyses and what plans; the arguments that each got."""
    calls: dict[str, Any] = {}

    def analyze(*args: Any, **kwargs: Any) -> Any:
        calls["analyze"] = (args, kwargs)
        return make_analysis()

    def plan(_: Any, **kwargs: Any) -> Plan:
        calls["plan"] = {name: value for name, value in kwargs.items() if value is not None}
        return make_plan()

    def pareto(_: Any, **kwargs: Any) -> Front:
        calls["pareto"] = {name: value for name, value in kwargs.items() if value is not None}
        return Front(make_front())

    monkeypatch.setattr(fxmem, "analyze", analyze)
    monkeypatch.setattr(fxmem, "plan", plan)
    monkeypatch.setattr(fxmem, "pareto", pareto)
    monkeypatch.setattr(Plan, "find_step", lambda *_: None)
    return calls


def test_a_limit_gives_one_plan_and_none_the_table(
    calls: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*ONE, "-o", str(tmp_path / "plan.json")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Peak 30.00 MiB -> 21.00 MiB (70.0 %) for 25.0 % more time, ")
    assert err == ""
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == make_plan()
    assert main([*COMMAND, "--points", "5", "--style", "graph"]) == 0
    assert capsys.readouterr().out.startswith("Peak 30.00 MiB; 3 plans, down to 28.00 MiB\n")
    assert calls["pareto"] == {"points": 5, "style": "graph"}
    assert main([*COMMAND, "-o", str(tmp_path / "front.csv")]) == 0
    rows = (tmp_path / "front.csv").read_text().splitlines()
    assert rows[0].startswith("peak,of the step's,") and rows[1].startswith("31457280,100.0 %,")


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces what finds advice; the arguments that it got."""
    calls: list[Any] = []

    def find_advice(*args: Any) -> tuple[Finding, ...]:
        calls.append(args)
        option, cost = 'autocast="bf16"', "Numerics change."
        return (Finding("FX301", "Autocast", option, 20 << 20, 10 << 20, cost),)

    module = types.ModuleType("fxmem.advice.advising")
    module.find_advice = find_advice  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxmem.advice.advising", module)
    return calls


def test_advice_stands_in_place_of_the_table_and_follows_a_plan(
    advised: list[Any], calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--optimizer", "adam", "--advice"]) == 0
    peak = format_bytes(make_analysis().peak_bytes)
    title, _, _, what, *_ = capsys.readouterr().out.splitlines()
    assert title == f"Peak {peak}"
    assert what == f"Other ways to lower the peak of {peak}, each by itself and without a plan:"
    assert "pareto" not in calls
    ((_, target, inputs, named, options),) = advised
    assert (target, inputs, named, options["optimizer"]) == ("nets/net.py:Net", (), {}, "adam")
    assert main(ONE) == 0
    plan = capsys.readouterr().out
    assert main([*ONE, "--advice"]) == 0
    assert capsys.readouterr().out.startswith(f"{plan}\nOther ways to lower the peak of ")


def test_compile_lists_budgets_of_the_compiled_model(
    calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = MemoryBudget(1.0, 4 << 20, 2 << 20, 0.0, 0.0), MemoryBudget(0.5, 3 << 20, 0, 0.1, 0.2)
    budgets = MemoryBudgets(points, make_analysis().setup)
    monkeypatch.setattr(fxmem, "memory_budgets", lambda _: budgets)
    assert main([*COMMAND, "--compile"]) == 0
    assert calls["analyze"][1]["compile"] is True
    out = capsys.readouterr().out
    assert out.startswith("Peak 4.00 MiB compiled, with recomputation down to 3.00 MiB\n")
    assert "75.0 %" in out
    with pytest.raises(SystemExit, match="2"):
        main([*COMMAND, "--compile", "--budget", "1GiB"])


def test_json_is_the_plan_or_a_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE, "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == make_plan()
    assert main([*COMMAND, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert tuple(Plan.from_json(json.dumps(plan)) for plan in plans) == make_front()


def test_no_plan_is_exit_1_and_leaves_the_file_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def plan(*_: Any, **__: Any) -> Plan:
        raise InfeasibleError("no plan within 24.00 MiB was found")

    monkeypatch.setattr(fxmem, "plan", plan)
    path = tmp_path / "plan.json"
    path.write_text("an older plan")
    assert main([*ONE, "-o", str(path)]) == 1
    assert capsys.readouterr() == ("", "fxmem: error: no plan within 24.00 MiB was found\n")
    assert path.read_text() == "an older plan"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--budget", "24MiB"], {"budget": 24 * 1024**2}),
        (["--max-overhead", "0.1"], {"max_overhead": 0.1}),
        (["--max-overhead", "10%"], {"max_overhead": 0.1}),
        (["--max-overhead", "300 %"], {"max_overhead": 3.0}),
        (["--max-overhead-flops", "0"], {"max_overhead_flops": 0.0}),
        (
            ["--budget", "1GB", "--time-limit", "2.5", "--style", "modules"],
            {"budget": 10**9, "time_limit_s": 2.5, "style": "modules"},
        ),
    ],
)
def test_the_limit_reaches_the_planner(
    calls: dict[str, Any], arguments: list[str], limit: dict[str, Any]
) -> None:
    assert main([*COMMAND, *arguments]) == 0
    assert calls["plan"] == limit


@pytest.mark.parametrize("limit", [{}, {"budget": 10**9}])
def test_inference_has_one_plan_without_a_limit(
    calls: dict[str, Any], capsys: pytest.CaptureFixture[str], limit: dict[str, Any]
) -> None:
    assert main([*COMMAND, "--mode", "infer", *(["--budget", "1GB"] if limit else [])]) == 0
    assert calls["analyze"][1]["mode"] == "infer"
    assert calls["plan"] == limit
    assert capsys.readouterr().out.startswith("Peak 30.00 MiB -> ")


def test_fit_asks_for_the_cheapest_that_fits(
    calls: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(_: Any, **kwargs: Any) -> Plan:
        calls["fit"] = {name: value for name, value in kwargs.items() if value is not None}
        return make_plan()

    monkeypatch.setattr(planner, "plan_fitting", fit)
    assert main([*COMMAND, "--gpu", "t4", "--fit", "--time-limit", "5"]) == 0
    assert capsys.readouterr().out.startswith("Peak 30.00 MiB -> 21.00 MiB")
    assert calls["fit"] == {"time_limit_s": 5.0}
    assert "plan" not in calls

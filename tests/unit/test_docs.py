"""The documentation says what the code does."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hand_made import add_first_step, make_analysis, make_graph
from hand_made_plans import make_plan

import fxmem
from fxmem.advice.record import Advice
from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.cli import COMMANDS, _build_parser
from fxmem.graph import Category, Phase
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import Plan, Segment
from fxmem.recording.losses import LOSSES
from fxmem.recording.optimizers import OPTIMIZERS
from fxmem.verifying.verification import Difference, Kind, Promise, StepFigures, Verification

ROOT = Path(__file__).parents[2]
JSON_DOC = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
CLI_DOC = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
API_DOC = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
STEP = CLI_DOC.split("## The step")[1].split("## The result")[0]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def list_documented(section: str, level: str = "##") -> list[str]:
    text = JSON_DOC.split(f"\n{level} `{section}`\n")[1].split("\n##")[0]
    return re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)


def find_example(section: str) -> dict[str, Any]:
    result = make_analysis(add_first_step(make_graph(), 1)).to_dict()
    return {
        "analysis": result,
        "first_step": result["first_step"],
        "peak": result["peak"],
        "source": result["peak"]["source"],
        "nodes": result["nodes"][1],
        "storages": result["storages"][0],
        "operations": result["operations"][0],
        "saved": result["saved"][0],
        "timeline": result["timeline"],
        "events": result["timeline"]["events"][0],
    }[section]


SECTIONS = re.findall(r"^## `(\w+)`", JSON_DOC, flags=re.MULTILINE)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_the_json_is_documented_in_order(section: str) -> None:
    assert list_documented(section) == list(find_example(section))


def test_every_object_of_the_json_has_a_section() -> None:
    assert [
        *["analysis", "peak", "first_step", "source", "nodes", "storages", "operations", "saved"],
        *["timeline", "events"],
    ] == SECTIONS


@pytest.mark.parametrize("section", ["plan", "segments", "inplace", "dels"])
def test_every_field_of_a_plan_is_documented_in_order(section: str) -> None:
    fields = json.loads(make_plan().to_json())
    example = fields if section == "plan" else fields[section][0]
    assert list_documented(section, "###") == list(example)


def make_verification() -> Verification:
    figures = StepFigures(1, 1, 1.0)
    return Verification(
        **{field.name: () for field in dataclasses.fields(Verification)}
        | {"differences": (Difference(1, Kind.LOSS, "loss"),), "compared": {}}
        | {"baseline": figures, "planned": figures, "promise": Promise(1, True, 0.0, True)}
    )


@pytest.mark.parametrize("section", ["verification", "differences", "baseline", "promise"])
def test_every_field_of_a_verification_is_documented_in_order(section: str) -> None:
    fields = make_verification().to_dict()
    example = fields if section == "verification" else fields[section]
    assert list_documented(section, "###") == list(
        example[0] if section == "differences" else example
    )


@pytest.mark.parametrize("word", [*Category, *Phase])
def test_every_category_and_phase_is_documented(word: Category | Phase) -> None:
    assert f"`{word.value}`" in JSON_DOC


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str) -> None:
    text = CLI_DOC if command == "analyze" else CLI_DOC.split(f"## `fxmem {command}`")[1] + STEP
    help_text = _build_parser()._subparsers._group_actions[0].choices[command].format_help()
    options = set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}
    assert {option for option in options if option not in text} == set()


def list_names(section: str, text: str) -> list[str]:
    """The names in the first column of a section's table."""
    section = re.split(r"\n##+ ", text.split(f"# {section}\n")[1])[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return re.findall(r"`(\w[\w-]*)", " ".join(rows))


def test_every_loss_is_documented() -> None:
    assert set(list_names("Losses", CLI_DOC)) == set(LOSSES)


def test_every_optimizer_is_documented_in_order() -> None:
    assert list_names("Optimizers", CLI_DOC) == list(OPTIMIZERS)


def test_every_argument_of_analyze_is_documented_in_order() -> None:
    arguments = list(inspect.signature(analyze).parameters)
    assert list_names("`fxmem.analyze`", API_DOC) == arguments
    (signature,) = re.findall(r"^fxmem\.analyze\((.*?)\)$", API_DOC, re.MULTILINE | re.DOTALL)
    shown = inspect.signature(
        eval(f"lambda {' '.join(signature.split())}: None")
    ).parameters.values()
    real = inspect.signature(analyze).parameters.values()
    assert [(p.name, p.kind, p.default) for p in shown] == [
        (p.name, p.kind, p.default) for p in real
    ]


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("`Analysis`", Analysis),
        ("`Peak`", Peak),
        ("`Plan`", Plan),
        ("`Segment`", Segment),
        ("`Advice`", Advice),
        ("`Verification`", Verification),
        ("`Difference`", Difference),
    ],
)
def test_every_attribute_is_documented(section: str, kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    public = fields | {name for name in vars(kind) if not name.startswith("_")}
    assert set(list_names(section, API_DOC)) == public


@pytest.mark.parametrize("name", ["plan", "pareto", "apply", "auto", "verify", "advise"])
def test_every_argument_for_plans_is_documented(name: str) -> None:
    (arguments,) = re.findall(rf"^\| `fxmem\.{name}\((.*?)\)` \|", API_DOC, re.MULTILINE)
    shown = inspect.signature(eval(f"lambda {arguments}: None")).parameters.values()
    real = inspect.signature(getattr(fxmem, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in shown] == [
        (p.name, p.kind, p.default) for p in real
    ]


def test_every_error_is_documented() -> None:
    assert set(list_names("Errors", API_DOC)) == {
        name for name in fxmem.__all__ if name.endswith("Error") and name != "FxmemError"
    }


def test_every_public_name_is_documented() -> None:
    names = set(fxmem.__all__) - {"__version__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", API_DOC)} == set()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: fxmem\.(\w+)$", text, flags=re.MULTILINE))
    errors = {name for name in fxmem.__all__ if name.endswith(("Error", "Warning"))}
    assert "errors" in named
    assert named >= {*fxmem.__all__} - errors - {"__version__"}

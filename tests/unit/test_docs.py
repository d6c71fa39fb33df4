"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hand_made import make_analysis

from fxmem.cli import _build_parser
from fxmem.graph import Category, Phase

ROOT = Path(__file__).parents[2]
JSON_DOC = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def list_documented(section: str) -> list[str]:
    text = JSON_DOC.split(f"\n## `{section}`\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)


def find_example(section: str) -> dict[str, Any]:
    result = make_analysis().to_dict()
    return {
        "analysis": result,
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
        *["analysis", "peak", "source", "nodes", "storages", "operations", "saved", "timeline"],
        "events",
    ] == SECTIONS


@pytest.mark.parametrize("word", [*Category, *Phase])
def test_every_category_and_phase_is_documented(word: Category | Phase) -> None:
    assert f"`{word.value}`" in JSON_DOC


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    help_text = _build_parser()._subparsers._group_actions[0].choices["analyze"].format_help()
    options = set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}
    assert {option for option in options if option not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link

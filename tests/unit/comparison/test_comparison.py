"""Comparisons of hand-made peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hand_made import MIB, make_analysis

from fxmem.comparison.changes import (
    compare_modules,
    find_guilty_line,
    list_changes,
    match_storages,
    read_footprint,
)
from fxmem.comparison.comparison import Comparison, compare, measure_allowance
from fxmem.errors import UsageError
from fxmem.graph import Category, SourceLocation
from fxmem.report.document import LiveRow

ROOT = "/home/me"


def make_storage(label: str, mib: int, line: int | None, **fields: Any) -> LiveRow:
    source = None if line is None else SourceLocation("net.py", line)
    storage = LiveRow(mib * MIB, Category.ACTIVATION, label, (mib,), "float32", source)
    return replace(storage, **fields)


def make_comparison() -> Comparison:
    """The hand-made step, and the same with a ReLU that takes 6 MiB more and has moved a line."""
    report = make_analysis().to_dict()
    before = read_footprint(report, ROOT)
    relu = next(n for n in report["nodes"] if n["target"] == "relu")
    relu["source"]["line"] += 1
    for storage in report["storages"]:
        if storage["label"] == relu["name"]:
            storage["nbytes"] += 6 * MIB
    report["peak_bytes"] += 6 * MIB
    report["breakdown"]["ACTIVATION"] += 6 * MIB
    return compare(before, read_footprint(report, ROOT), names=("a", "b"))


def test_a_footprint_sums_to_the_peak_and_names_files_from_the_root() -> None:
    report = make_analysis().to_dict()
    report["nodes"][1]["fqn"] = "fc1"
    footprint = read_footprint(report, ROOT)
    assert sum(storage.nbytes for storage in footprint.live) == footprint.peak_bytes
    assert {s.source.file for s in footprint.live if s.source} == {"nets/net.py"}
    weight = next(s for s in footprint.live if s.category is Category.PARAMETER)
    assert str(weight.source) == "net.py:11"  # where its module runs


def test_a_damaged_report_is_refused() -> None:
    report = make_analysis().to_dict()
    report["storages"] = []
    with pytest.raises(UsageError, match=r"the report is damaged: .* \(write it again\)"):
        read_footprint(report)


def test_what_grew_is_named_with_its_module_and_line() -> None:
    comparison = make_comparison()
    assert comparison.growth_bytes == 6 * MIB
    assert comparison.guilty == SourceLocation("nets/net.py", 13, "forward")
    (change,) = comparison.changes
    assert (change.label, change.before_bytes, change.growth_bytes) == (
        "block.relu",
        4 * MIB,
        6 * MIB,
    )
    assert comparison.modules == {"block": (12 * MIB, 18 * MIB)}


def test_the_text_begins_with_the_growth() -> None:
    lines = str(make_comparison()).splitlines()
    assert lines[0] == "Peak 30.00 MiB -> 36.00 MiB: +6.00 MiB (+20.0 %), most at net.py:13"
    assert lines[2] == "a: peak in backward of block.relu, net.py:12"
    assert lines[-1].split() == [
        *("4.00", "MiB", "10.00", "MiB", "+6.00", "MiB", "ACTIVATION", "block.relu"),
        *("8x1024", "float32", "net.py:13"),
    ]
    shrunk = compare(make_comparison().after, make_comparison().before)
    assert shrunk.describe() == "Peak 36.00 MiB -> 30.00 MiB: -6.00 MiB (-16.7 %)"
    assert compare(shrunk.after, shrunk.after).describe() == "Peak unchanged: 30.00 MiB"


def test_storages_beyond_the_first_are_summed_up() -> None:
    comparison = make_comparison()
    (change,) = comparison.changes
    other = replace(change, source=None, after_bytes=5 * MIB)
    others = [replace(other, label=f"{i}") for i in range(2)]
    modules = {"": (0, 1), "a": (1, 0), "b": (0, 1)}
    more = replace(comparison, changes=(change, *others), modules=modules)
    assert more.to_text(top=1).endswith("\n... and 2 more, +2.00 MiB\n")
    assert "\n(none) " in more.to_text(top=1) and "\n... and 2 more\n" in more.to_text(top=1)
    assert " 0 and 1 alike " in more.to_text(top=2)


@pytest.mark.parametrize(("mib", "first"), [(2, "grown"), (8, "shrunk")])
def test_storages_that_shrank_come_first_if_they_are_more(mib: int, first: str) -> None:
    before, after = [make_storage("shrunk", mib, 1)], [make_storage("grown", 4, 2)]
    table = list_changes(match_storages(before, after), 1)
    assert table.rows[0][4] == first


def test_markdown_has_the_same_tables() -> None:
    text = make_comparison().to_text(markdown=True)
    assert text.startswith("### Peak 30.00 MiB -> 36.00 MiB: +6.00 MiB")
    assert "\n| module | before | after | change |\n| :-- | --: | --: | --: |\n| block |" in text


def test_json_has_the_totals_and_the_changes() -> None:
    values = json.loads(make_comparison().to_json())
    assert values["growth_bytes"] == 6 * MIB
    assert (values["after"]["name"], values["after"]["peak_bytes"]) == ("b", 36 * MIB + 4)
    assert values["guilty"] == {"file": "nets/net.py", "line": 13, "function": "forward"}
    assert [change["growth_bytes"] for change in values["changes"]] == [6 * MIB]


def test_different_steps_are_told_apart() -> None:
    comparison = make_comparison()
    setup = replace(comparison.after.setup, optimizer="sgd")
    other = compare(comparison.before, replace(comparison.after, setup=setup)).to_text()
    assert "\nbefore: nets/net.py:Net; " in other and "\nafter: nets/net.py:Net; " in other


def test_a_renamed_module_is_no_change() -> None:
    assert match_storages([make_storage("a.fc", 4, 1)], [make_storage("b.fc", 4, 2)]) == ()


def test_what_is_gone_comes_last() -> None:
    before = [make_storage("a", 9, 1), make_storage("b", 1, 2)]
    changes = match_storages(before, [make_storage("b", 2, 2)])
    assert [(c.label, c.growth_bytes // MIB) for c in changes] == [("b", 1), ("a", -9)]


def test_a_library_is_never_guilty() -> None:
    source = SourceLocation("/lib/site-packages/timm/vit.py", 3)
    changes = match_storages([], [make_storage("a", 9, None, source=source)])
    assert find_guilty_line(changes) is None


@pytest.mark.parametrize(("blocks", "depth"), [(10, 2), (11, 1)])
def test_modules_are_compared_at_the_deepest_readable_level(blocks: int, depth: int) -> None:
    after = [make_storage("x", 1, None, fqn=f"blocks.{i}") for i in range(blocks)]
    modules = compare_modules([], after)
    assert len(modules) == (blocks if depth == 2 else 1)
    assert sum(new - old for old, new in modules.values()) == blocks * MIB


def test_a_limit_on_growth_needs_a_unit() -> None:
    assert measure_allowance("0.5 %", 1000) == 5
    assert measure_allowance("0", 1000) == 0
    with pytest.raises(UsageError) as caught:
        measure_allowance("2", 1000)
    assert str(caught.value) == "the limit '2' on growth has no unit (2% or 2MiB?)"

"""Published measurements: how they are read, compared and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.__main__ import predict_rows
from benchmarks.published.cases import Case, is_equal, list_sources, load_cases, record_errors
from benchmarks.published.page import list_rows, write_causes, write_source, write_summary

FILE: dict[str, Any] = {
    "origin": "github.com/somebody/nets@1234567 log.txt",
    "gpu": "a100-80gb",
    "torch": "2.11.0",
    "configuration": "stated",
    "cases": [
        {"id": "exact", "measured": {"allocated": 1_000_000}},
        {
            "id": "rounded",
            "measured": {"reserved": 2_000_000, "allocated after forward": 1_500_000},
            "rounding_bytes": 100_000,
            "configuration": "inferred",
            "inferred": ["batch: by the trace"],
            "cause_kind": "library",
            "cause": "cuDNN chooses.",
        },
    ],
}


def write_file(folder: Path, **changes: object) -> None:
    file = json.loads(json.dumps(FILE))
    file["cases"][0] |= changes
    (folder / "nets.json").write_text(json.dumps(file))


def load(folder: Path) -> list[Case]:
    write_file(folder)
    return load_cases("nets", folder)


def test_what_all_cases_share_stands_beside_them(tmp_path: Path) -> None:
    exact, rounded = load(tmp_path)
    assert list_sources(tmp_path) == ["nets"]
    assert (exact.gpu, exact.configuration) == ("a100-80gb", "stated")
    assert (rounded.gpu, rounded.configuration) == ("a100-80gb", "inferred")
    assert exact.repository == "somebody/nets"
    for origin, repository in (
        ("github.com/pytorch/pytorch/issues/123533 (April 2024)", "pytorch/pytorch"),
        ("dnswlt/hexz@01e7beb apm.py", "dnswlt/hexz"),
        ("a script whose figures stand in its comments", "nets"),
    ):
        write_file(tmp_path, origin=origin)
        assert load_cases("nets", tmp_path)[0].repository == repository


def test_a_case_that_says_something_else_is_refused(tmp_path: Path) -> None:
    for changes in (
        {"configuration": "sure"},
        {"cause_kind": "the weather"},
        {"measured": {"used": 1}},
        {"measured": {"allocated": 0}},
    ):
        write_file(tmp_path, **changes)
        with pytest.raises(ValueError, match="nets: exact"):
            load_cases("nets", tmp_path)


def test_equal_is_to_the_kib_or_to_the_last_digit_published(tmp_path: Path) -> None:
    exact, rounded = load(tmp_path)
    assert is_equal(exact, 1023) and not is_equal(exact, -1024)
    assert is_equal(rounded, -99_999) and not is_equal(rounded, 100_000)


def test_errors_are_recorded_beside_the_measurement(tmp_path: Path) -> None:
    write_file(tmp_path)
    record_errors("nets", {"exact": {"allocated": -5}}, "2.13.0", tmp_path)
    exact, rounded = load_cases("nets", tmp_path)
    assert (exact.error, exact.recorded_with) == ({"allocated": -5}, "2.13.0")
    assert (rounded.error, rounded.recorded_with) == ({}, "")


def test_a_page_counts_what_is_equal_and_names_causes(tmp_path: Path) -> None:
    exact, rounded = load(tmp_path)
    predicted = {"reserved": 1_900_000, "allocated after forward": 1_500_000}
    rows = [*list_rows(exact, {"allocated": 1_000_512}), *list_rows(rounded, predicted)]
    assert [row.error_bytes for row in rows] == [512, -100_000, 0]
    summary = write_summary(rows)
    assert "| stated          | allocated | 1         | 1         | 1 (100 %)" in summary
    assert "| inferred        | reserved  | 1         | 1         | 0 (0 %)" in summary
    assert "library" in write_causes(rows)
    assert write_source(rows).endswith(
        "- Inferred: batch: by the trace. (rounded)\n- Differs (library): cuDNN chooses. (rounded)"
    )


def test_a_case_that_cannot_be_predicted_is_a_row(tmp_path: Path) -> None:
    row = predict_rows(load(tmp_path)[0])[0]
    assert row.predicted_bytes is None
    assert row.failure == "ModuleNotFoundError: No module named 'benchmarks.published.sources.nets'"
    assert row.relative == -1

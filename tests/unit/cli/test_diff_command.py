"""`fxmem diff` of reports that are made by hand, and of what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hand_made import make_analysis

from fxmem.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    report = make_analysis().to_dict()
    (tmp_path / "a.json").write_text(json.dumps(report))
    report["peak_bytes"] *= 2
    (tmp_path / "b.json").write_text(json.dumps(report))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "code"), [("", 0), ("--fail-above 99%", 1), ("--fail-above 31MiB", 0)]
)
def test_only_growth_beyond_the_limit_is_a_finding(
    limit: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "a.json", "b.json", *limit.split()]) == code
    out, err = capsys.readouterr()
    assert out.startswith("Peak 30.00 MiB -> 60.00 MiB: +30.00 MiB (+100.0 %)\n")
    assert err == ("fxmem: the peak grows by 30.00 MiB, more than 99%\n" if code else "")
    assert main(["diff", "b.json", "a.json", *limit.split()]) == 0


@pytest.mark.parametrize(("format", "start"), [("json", "{"), ("markdown", "### Peak")])
def test_each_format_is_written(format: str, start: str, folder: Path) -> None:
    options = ["--fail-above", "0", "--format", format, "-o", "result"]
    assert main(["diff", "a.json", "b.json", *options]) == 1
    assert (folder / "result").read_text().startswith(start)


NAMES = (
    "name two saved reports, or a TARGET and --git "
    "(fxmem diff before.json after.json, or fxmem diff TARGET --git main)"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a.json", NAMES),
        ("net.py:Net", NAMES),
        ("a.json b.json --input 3", NAMES),
        ("a.json b.json --fail-above 2", "the limit '2' on growth has no unit (2% or 2MiB?)"),
        ("a b --git main", "with --git, one TARGET is compared with itself (leave b out)"),
        (
            "net.py:Net --git main",
            "{folder} is not in a git repository (compare two reports instead)",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *shlex.split(arguments)]) == 2
    assert capsys.readouterr() == ("", f"fxmem: error: {message.format(folder=folder)}\n")

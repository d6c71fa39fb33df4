"""The table of public scripts, and what becomes of a launch."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from benchmarks.script_corpus import runner
from benchmarks.script_corpus.data import MAKERS
from benchmarks.script_corpus.launches import COMMITS, LAUNCHES, Launch
from benchmarks.script_corpus.page import write_page
from benchmarks.script_corpus.runner import Data, Outcome, find_sources, run_launch

TRAIN = """
import sys, torch
weight = torch.zeros(int(sys.argv[1]), device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    DOWNLOAD
    weight.sum().backward()
    optimizer.step()
"""
EDIT = ("train.py", "DOWNLOAD", "pass")
EDITED = Launch("made up", "tests", "someone/something", "train.py 100", edits=(EDIT,))


def test_the_table_says_of_each_launch_what_it_needs() -> None:
    assert len({launch.name for launch in LAUNCHES}) == len(LAUNCHES) >= 60
    assert {launch.repository for launch in LAUNCHES} == set(COMMITS)
    assert len(COMMITS) >= 25 and sum(launch.cpu is not None for launch in LAUNCHES) >= 25
    for launch in LAUNCHES:
        texts = [launch.command, *launch.place.values(), *launch.env.values()]
        texts += [new for _, _, new in launch.edits]
        names = {name for text in texts for _, name, *_ in string.Formatter().parse(text) if name}
        assert names <= {*MAKERS, "stubs", "here"}, launch.name


def test_a_launch_runs_in_an_edited_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMITS, EDITED.repository, "abc")
    monkeypatch.setattr("benchmarks.script_corpus.page.LAUNCHES", (EDITED,))
    source = tmp_path / "something"
    source.mkdir()
    (source / "train.py").write_text(TRAIN)
    (source / "COMMIT").write_text("abcdef 2026-01-01")
    assert find_sources(EDITED, tmp_path) == source
    outcome = run_launch(EDITED, source, Data(tmp_path), 60)
    assert not outcome.line and len(outcome.peaks) == 3, outcome.output
    assert "DOWNLOAD" in (source / "train.py").read_text()
    page = write_page({EDITED.name: outcome}, "made today")
    assert "someone/something" in page and "`DOWNLOAD`" in page and "1 give a report" in page
    (source / "COMMIT").write_text("another")
    assert find_sources(EDITED, tmp_path) is None


def test_a_refusal_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMITS, EDITED.repository, "abc")
    monkeypatch.setattr("benchmarks.script_corpus.page.LAUNCHES", (EDITED,))
    page = write_page({EDITED.name: Outcome(line="fxmem: error: a | line")}, "made today")
    assert "| a / line" in page and "0 give a report" in page


def test_an_edit_of_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ValueError, match="has no 'DOWNLOAD'"):
        runner.prepare(EDITED, tmp_path, Data(tmp_path), tmp_path / "copy")

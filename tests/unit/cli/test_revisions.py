"""Revisions of a small repository, with a child process that needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hand_made import make_analysis

from fxmem.cli import diff, main

FAILS = "import sys; sys.exit('noise\\nfxmem: error: no \\'Net\\' in \\'net.py\\'')"
REPORTS = """
import os, sys
target, path = sys.argv[2], sys.argv[sys.argv.index("-o") + 1]
here = os.environ.get("STRAY", os.getcwd())
with open("report.json") as report, open(path, "w") as result:
    result.write(report.read().replace("/home/me", here))
with open(os.environ["SEEN"], "a") as seen:
    print(os.getcwd(), target, os.environ["PYTHONPATH"], file=seen)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(diff, "_CHILD", REPORTS)
    monkeypatch.setattr(diff, "analyze_step", lambda step: make_analysis())
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    (folder / "report.json").write_text(json.dumps(make_analysis().to_dict()))
    git("init", "--quiet", "--initial-branch", "main")
    git("add", ".")
    git("-c", "user.name=me", "-c", "user.email=me@example.com", "commit", "--quiet", "-m", "one")
    return folder


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def fail(capsys: pytest.CaptureFixture[str], revision: str) -> str:
    assert main(["diff", "net.py:Net", "--git", revision]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("fxmem: error: ").strip()


def test_a_revision_runs_in_its_own_checkout(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository / "lib"), "/elsewhere"]))
    monkeypatch.syspath_prepend(str(repository / "lib"))
    (repository / "report.json").write_text("{}")  # that of the revision is another
    assert main(["diff", "net.py:Net", "--git", "main"]) == 0
    assert capsys.readouterr().out.startswith("Peak unchanged: 30.00 MiB\n")
    folder, target, paths = Path(os.environ["SEEN"]).read_text().split()
    assert target == "net.py:Net"
    assert paths.split(os.pathsep)[0] == f"{folder}/lib"
    assert paths.endswith("/elsewhere") and str(repository) not in paths
    assert not Path(folder).exists()


def test_a_revision_that_is_not_there(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(capsys, "nope") == (
        "git knows no revision 'nope' (is it fetched? In GitHub Actions: fetch-depth: 0)"
    )


def test_a_folder_that_a_revision_lacks(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "new").mkdir()
    monkeypatch.chdir(repository / "new")
    assert fail(capsys, "main") == "there is no folder 'new' at main"


def test_an_error_names_its_revision(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diff, "_CHILD", FAILS)
    commit = git("rev-parse", "main")[:9]
    assert fail(capsys, "main") == f"at main ({commit}): no 'Net' in 'net.py'"


def test_code_of_the_working_tree_is_no_revision(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRAY", str(repository))
    assert fail(capsys, "main").partition(", ")[2] == (
        f"the model still comes from the working tree, {repository}/nets/net.py "
        "(name its file: path/to/file.py:Model)"
    )

"""A repository whose second commit takes more memory, as CI sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxmem.cli import main

MODEL = """\
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        # the widest tensor
        hidden = F.gelu(self.up(x))
        return self.down(hidden)
"""
GUILTY = "        hidden = F.gelu(hidden.double()).float()"
COMMAND = ["diff", "nets/net.py:Net", "--input", "4096x64", "--device", "cpu", "--git", "HEAD~"]


PROJECT = """\
[[tool.fxmem.checks]]
target = "nets/net.py:Net"
input = ["4096x64"]
device = "cpu"
budget = "16MiB"
"""
CACHED = """\
import sys
from fxmem.cli import main
code = main(["check", "--format", "github"])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits: a model, and the same with a line that saves a tensor in float64."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets").mkdir()
    net = tmp_path / "nets" / "net.py"
    net.write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    git("init", "--quiet")
    commit("good")
    activation = "        hidden = F.gelu(self.up(x))\n"
    net.write_text(MODEL.replace(activation, f"\n{activation}{GUILTY}\n"))
    commit("bad")
    return tmp_path


def git(*arguments: str) -> str:
    user = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    done = subprocess.run(["git", *user, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def commit(message: str) -> None:
    git("add", ".")
    git("commit", "--quiet", "--message", message)


def find_guilty_line(repository: Path) -> int:
    return (repository / "nets" / "net.py").read_text().splitlines().index(GUILTY) + 1


def test_the_bad_commit_fails_on_its_line(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--fail-above", "5%", "--format", "github"]) == 1
    out, err = capfd.readouterr()
    line = find_guilty_line(repository)
    assert out.startswith(f"::error file=nets/net.py,line={line},title=fxmem peak-growth::Peak ")
    assert out.count("\n") == 1 and err.startswith("fxmem: the peak grows by ")
    assert git("worktree", "list").count("\n") == 1
    assert git("status", "--short") == ""


def test_a_check_fails_on_the_line_that_grew_and_costs_nothing_unchanged(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git("checkout", "--quiet", "HEAD~")
    assert main(["check", "--quiet"]) == 0
    assert git("status", "--short") == ""
    git("checkout", "--quiet", "-")
    assert main(["check", "--format", "sarif"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    place = finding["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "nets/net.py"
    assert place["region"]["startLine"] == find_guilty_line(repository)
    command = [sys.executable, "-c", CACHED]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error file=nets/net.py,line=")

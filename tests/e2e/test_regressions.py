"""A repository whose second commit takes more memory, as CI sees it."""

from __future__ import annotations

import json
import subprocess
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
    assert main([*COMMAND, "--fail-above", "5%", "--format", "json"]) == 1
    out, err = capfd.readouterr()
    guilty = json.loads(out)["guilty"]
    assert (guilty["file"], guilty["line"]) == ("nets/net.py", find_guilty_line(repository))
    assert err.startswith("fxmem: the peak grows by ")
    assert git("status", "--short") == ""


def test_a_check_fails_over_its_budget_alone(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git("checkout", "--quiet", "HEAD~")
    assert main(["check", "--quiet"]) == 0
    assert git("status", "--short") == ""
    git("checkout", "--quiet", "-")
    assert main(["check", "--format", "json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["verdict"]["rule"] == "over-budget"
    source = check["verdict"]["source"]
    assert (source["file"], source["line"]) == ("nets/net.py", find_guilty_line(repository))

"""The README's own claims: the commands to set up, the example for Python."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pages import ROOT, list_blocks, list_commands

README = ROOT / "README.md"


def test_the_sample_is_of_the_command_that_sets_up() -> None:
    blocks = list_blocks(README)
    (sample,) = (block for block in blocks if block.mark.startswith("output of: "))
    assert sample.mark.removeprefix("output of: ") == list_commands(blocks[0])[0]


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if re.match(r"python3 -m venv .*pytest", line)]) == 1


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python_api.py")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["batch 64", "batch 512", "batch 4096"]

"""``fxmem verify`` on a model in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fxmem.cli import main

ROOT = Path(__file__).parents[2]
NETS = """
import torch
from torch import nn

print("on import")

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expand = nn.Linear(width, 8 * width)
        self.norm = nn.BatchNorm1d(8 * width)
        self.drop = nn.Dropout(0.2)
        self.contract = nn.Linear(8 * width, width)

    def forward(self, x):
        return self.contract(self.drop(torch.sigmoid(self.norm(self.expand(x)))))

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x
"""
INPUT = ("nets.py:Net", "--input", "256x16")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nets.py and a plan for it."""
    path = tmp_path_factory.mktemp("verify")
    (path / "nets.py").write_text(NETS)
    limit = ("--max-overhead", "50%", "--time-limit", "1", "--device", "cpu", "-o", "plan.json")
    with contextlib.chdir(path):
        assert main(["plan", *INPUT, *limit]) == 0
    return path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``fxmem verify`` in the folder; returns the exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run_verify(*arguments: str, command: str = "verify") -> tuple[int, str, str]:
        code = main([command, *arguments])
        return code, *capsys.readouterr()

    return run_verify


def test_a_plan_is_proved(run: Run) -> None:
    code, out, err = run(*INPUT, "--plan", "plan.json", "--optimizer", "adam")
    assert (code, err) == (0, "on import\n")
    head, compared, figures, note = out.split("\n\n")
    assert head.startswith("Equal bit for bit in 3 steps, measured peak ")
    assert "1 output, 1 loss, 24 gradients, 12 buffers, 24 parameters" in compared
    _, _, measured, promised, analyzed, _ = figures.splitlines()
    assert measured.split()[2:] == analyzed.split()[2:]
    assert promised.split()[2:] == analyzed.split()[4:]
    assert note.startswith("The plan's own promise, ")  # made without an optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nets.py:Net", "--input", "128x16"), "the plan was made for other sizes"),
        (("nets.py:Nett", "--input", "256x16"), "no 'Nett' in 'nets.py' (did you mean Net?)"),
        ((*INPUT, "--optimizer", "adamm"), "unknown optimizer 'adamm'"),
        ((*INPUT, "--loss", "mean"), "unknown loss 'mean'"),
        ((*INPUT, "--autocast", "fp16"), "verify does not support autocast to float16"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments, "--plan", "plan.json")
    assert (code, out) == (2, "")
    line = err.removeprefix("on import\n")
    assert line.startswith(f"fxmem: error: {message}")
    assert line.count("\n") == 1
    if "--" in arguments[-2] and arguments[-2] != "--input":  # told before the file is imported
        assert line == err

"""`fxmem max-batch` on a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fxmem.cli import main

NET = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1)]
        super().__init__(*layers)

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(nn.init.zeros_(nn.Linear(64, 40).weight))

    def forward(self, x):
        return x + self.positions[: x.shape[1]]
"""


NUMBERS = re.compile(r"[0-9.]+ [KMG]iB|[0-9.]+ %|[0-9]{4,}")


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}"


def read_shape(text: str) -> list[str]:
    """Reads the words of a text, without its figures, rules and spaces."""
    lines = (" ".join(NUMBERS.sub("N", line).split()) for line in text.splitlines())
    return [line for line in lines if line.strip("- ") and not line.startswith("/")]


def test_the_answer_and_the_next_size_are_shown(
    net: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["max-batch", f"{net}:Net", "--input", "64x8", "--device", "cpu"]
    assert main([*step, "--memory", "64MiB", "--max-overhead", "30%"]) == 0
    out, err = capsys.readouterr()
    *lines, last = read_shape(out)
    assert lines == [
        "Largest batch N, with a peak of N; N with a plan, for N more time",
        "step batch peak added time fits",
        "as it is N N yes",
        "as it is N N no: the peak is 613 B over",
        "with a plan N N N yes",
        "with a plan N N no: the peak is 613 B over",
        "Memory: N, minus N as a margin.",
    ]
    assert re.fullmatch(r"The batch is dimension 0 of input 0; [0-9] steps were analysed\.", last)
    assert err == ""


def test_a_size_that_the_model_refuses_is_explained(
    net: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["max-batch", f"{net}:Positions", "--input", "2x16x64", "--axis", "1"]
    assert main([*step, "--memory", "1GiB", "--margin", "0"]) == 0
    out = read_shape(capsys.readouterr().out)
    assert out[0] == "Largest size 40, with a peak of N"
    assert out[2:5] == ["as it is 40 N yes", "as it is 41 refused", out[4]]
    assert out[4] == "Memory: N, minus N for CUDA's context."
    assert out[6].startswith("The model refuses 41: the step failed at net.py:")
    assert not out[6].endswith("..")


def test_lists_make_a_table(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["max-batch", f"{net}:Net", "--input", "64x8", "--device", "cpu", "--memory", "64MiB"]
    step += ["--dtype", "none,bf16", "--optimizer", "sgd(lr=0.1, momentum=0.9)"]
    assert main(step) == 0
    out = read_shape(capsys.readouterr().out)
    assert out[0] == "The largest batch that fits N"
    assert out[1:4] == ["dtype batch peak next its peak", "none N N N N", "bf16 N N N N"]
    assert main([*step, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [row["dtype"] for row in values] == ["none", "bf16"]
    assert values[1]["batch"] > 1.9 * values[0]["batch"]


def test_a_file_is_read_once(net: str) -> None:
    with open(net, "a") as file:
        file.write("import torch\nlibrary = torch.library.Library('fxmem_read_once', 'DEF')\n")
    step = ["max-batch", f"{net}:Net", "--input", "64x8", "--device", "cpu", "--memory", "64MiB"]
    assert main([*step, "--dtype", "none,bf16"]) == 0


def test_a_memory_that_nothing_fits_is_a_finding(
    net: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["max-batch", f"{net}:Net", "--input", "64x8", "--device", "cpu", "--memory", "5K"]
    assert main(step) == 1
    out, err = capsys.readouterr()
    assert out.startswith("No batch fits 5.00 KiB\n")
    assert re.fullmatch(r"fxmem: no size fits 5.00 KiB: the peak is \d+ B over\n", err)

"""``fxmem fit``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.cli import main

MODEL = """
import torch
from torch import nn

def build(width=64):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)))

def parallelize(model, mesh):
    torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"])
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return f"{path}:build"


def test_table(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu=t4", "--gpus=16", "--optimizer=adamw", "--mixed-precision=bf16"]
    assert main(["fit", target, "--input=8x64", *options]) == 0
    head, _, _, header, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "Fits 16 x Tesla T4 (14.56 GiB): fsdp on replicate=2,shard=8 with no resharding"
    )
    assert header.split()[:4] == ["fits", "mesh", "by", "with"]
    assert rule.startswith("----  -------------------  ----  -------------  ")
    assert [row.split()[:3] for row in rows[:3]] == [
        ["yes", "replicate=2,shard=8", "fsdp"],
        ["yes", "dp=16", "fsdp"],
        ["yes", "dp=16", "ddp"],
    ]
    assert rows[-1] == "3 steps were recorded."


def test_json_and_a_function(target: str, tmp_path: Path) -> None:
    path, function = tmp_path / "fit.json", target.replace("build", "parallelize")
    options = ["--gpu=t4", "--gpus=4", f"--parallelize={function}", "--mesh=dp=*,tp=*"]
    assert main(["fit", target, "--input=8x64", *options, "--json", "-o", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["schema_version"] == 1
    assert [row["mesh"] for row in found["rows"]] == [
        {"dp": 1, "tp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 4, "tp": 1},
    ]


def test_exit_codes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["--gpu=t4", "--gpus=2", "--parallelize=ddp"]
    assert main(["fit", f"{target}(width=40000)", "--input=8x40000", *huge]) == 1
    assert capsys.readouterr().err.endswith("fxmem: nothing was found that fits 2 x Tesla T4\n")
    assert main(["fit", target, "--input=8x64"]) == 2
    assert capsys.readouterr().err == "fxmem: error: no GPU is given (--gpu h100)\n"

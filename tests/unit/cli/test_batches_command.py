"""`fxmem batches` on a small model."""

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
        super().__init__(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
"""
NUMBERS = re.compile(r"[0-9.]+ [KMG]iB|[0-9.]+ %")


@pytest.fixture
def step(tmp_path: Path) -> list[str]:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "sizes.json").write_text(json.dumps([*range(10, 400, 10)]))
    target, sizes = f"{tmp_path / 'net.py'}:Net", str(tmp_path / "sizes.json")
    return ["batches", target, "--input", "4x100x64", "--sizes", sizes, "--optimizer", "adamw"]


def test_the_fullest_and_the_settings_are_shown(
    step: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*step, "--cap", "200", "--replay", "5"]) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(NUMBERS.sub("N", line).split()) for line in out.splitlines()]
    lines = [line for line in lines if line.strip("- ") and not line.startswith("/")]
    assert re.fullmatch(r"Batch [1-9] of 9 is the fullest, with a peak of N", lines[0])
    header = "batches rows steps size padding FLOPs half up to N up to N up to fullest"
    assert lines[1] == header
    assert [line.split()[0] for line in lines[2:6]] == ["padded", "grouped", "packed", "cut"]
    assert lines[6] == "After 5 of the padded batches:"
    assert lines[7] == "PYTORCH_ALLOC_CONF reserved of them unused"
    assert [line.split()[0] for line in lines[8:11]] == [
        "as",
        "expandable_segments:True",
        "roundup_power2_divisions:8",
    ]
    assert "Of 39 samples, shuffled. The size is dimension 1 of input 0." in out
    assert "Half of the padded batches: up to " in out
    assert not err


def test_batches_that_do_not_fit_exit_with_1(
    step: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*step, "--gpu", "t4", "--reserve", "13.9GiB", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    padded, best = found["batchings"][0], min(found["batchings"], key=lambda b: b["unfitting"])
    assert (best["name"], best["unfitting"]) == ("packed", 0)
    assert err == f"fxmem: {padded['unfitting']} of 9 batches do not fit Tesla T4; packed: 0\n"
    assert [each["share"] for each in padded["quantiles"]] == [0.5, 0.9, 0.99, 1.0]
    assert found["fragmentation"][0]["alloc_conf"] == ""

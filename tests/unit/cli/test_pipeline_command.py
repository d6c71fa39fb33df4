"""`fxmem pipeline` on stages of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.cli import main

STAGES = """\
from torch import nn

def split():
    return [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
"""
TABLE = """\
Peak 939.75 KiB on rank 0 of 2, the fullest
{target}; 32x64:float32; Interleaved1F1B of 4 micro-batches; cpu; optimizer {name}; loss default

rank  stages        peak  in flight            each keeps  peak in
----  ------  ----------  ---------  --------------------  ---------------------
   0    0, 2  939.75 KiB       4, 2  10.00 KiB, 10.00 KiB  backward 1 of stage 0
   1    1, 3  923.52 KiB       3, 1  10.00 KiB, 10.00 KiB  backward 3 of stage 3

"""


def test_report_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    target = f"{tmp_path / 'stages.py'}:split"
    command = ["pipeline", target, "--input", "32x64", "--schedule", "Interleaved1F1B"]
    command += ["--microbatches", "4", "--optimizer", "sgd-momentum"]
    assert main([*command, "--device", "cpu", "--budget", "800KiB"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(TABLE.format(target=target, name="sgd-momentum"))
    assert err == "fxmem: over budget: the peak of rank 0, 939.75 KiB, is over 800.00 KiB\n"
    assert main([*command, "--json", "--gpu", "t4", "--no-outputs"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [rank["fits"] for rank in values["ranks"]] == [True, True]
    assert main([*command, "--gpu", "t4", "--schedule", "2F2B"]) == 2

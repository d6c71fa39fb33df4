"""`fxmem verify` around verifications that are made by hand."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hand_made_plans import make_verification

from fxmem.cli import main
from fxmem.planning.plan import Plan, Segment
from fxmem.verifying.verification import Difference, Kind, Promise, Verification

PLAN = Plan("0123", 200, 100, segments=(Segment("a", "b", 2),))
EQUAL = make_verification()
DIFFERENT = replace(
    EQUAL, equal=False, differences=(Difference(1, Kind.LOSS, "loss", "value", (), "1", "2"),)
)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Replaces what verifies; what it got, and what it returns."""
    calls: dict[str, Any] = {"result": EQUAL}

    def verify_target(*args: Any, **kwargs: Any) -> Verification:
        calls["args"], calls["kwargs"] = args, kwargs
        result: Verification = calls["result"]
        return result

    module = types.ModuleType("fxmem.verifying.proof")
    module.verify_target = verify_target  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxmem.verifying.proof", module)
    monkeypatch.chdir(tmp_path)
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # put back afterwards
        del os.environ[name]
    Path("plan.json").write_text(PLAN.to_json())
    return calls


COMMAND = ["verify", "net.py:Net", "--input", "8x3", "--plan", "plan.json"]


@pytest.mark.parametrize(
    ("result", "code", "line"),
    [
        (EQUAL, 0, "Equal bit for bit in 3 steps, measured peak 30.00 MiB -> 20.00 MiB"),
        (DIFFERENT, 1, "Different in step 1: loss loss is 1, with the plan 2"),
        (
            replace(EQUAL, promise=Promise(21 << 20, True, -0.02, False)),
            1,
            "Equal bit for bit in 3 steps, measured peak 30.00 MiB -> 20.00 MiB, 2.0% below the "
            "promised 21.00 MiB",
        ),
    ],
)
def test_the_answer_goes_to_stdout_or_as_json_to_a_file(
    calls: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    result: Verification,
    code: int,
    line: str,
) -> None:
    calls["result"] = result
    assert main(COMMAND) == code
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == (line, "")
    assert main([*COMMAND, "--json", "-o", "report.json"]) == code
    assert capsys.readouterr() == ("", "")
    assert json.loads(Path("report.json").read_text()) == result.to_dict()


def test_options_are_passed_on(calls: dict[str, Any]) -> None:
    options = ["--optimizer", "adam", "--loss", "mse", "--autocast", "bf16", "--dtype", "bf16"]
    more = ["--steps", "5", "--seed", "9", "--device", "cpu", "--input", "mask=8:bool"]
    layout = ["--mesh", "dp=2,tp=2", "--parallelize", "train.py:parallelize"]
    assert main([*COMMAND, *options, *more, *layout]) == 0
    target, plan, args, kwargs = calls["args"]
    assert (target, plan) == ("net.py:Net", PLAN)
    assert [*map(str, args)] == ["8x3:float32"]
    assert {name: str(spec) for name, spec in kwargs.items()} == {"mask": "8:bool"}
    assert calls["kwargs"] == {
        "optimizer": "adam",
        "loss": "mse",
        "autocast": "bf16",
        "dtype": "bfloat16",
        "steps": 5,
        "seed": 9,
        "device": "cpu",
        "mesh": {"dp": 2, "tp": 2},
        "parallelize": "train.py:parallelize",
    }

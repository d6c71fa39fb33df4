"""Figures that were measured, and what could make them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fxmem
from fxmem.cli import main
from fxmem.comparison.measured import explain_measured


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 4096))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


GIVEN = {"optimizer": "adam", "loss": "mse", "gpu": "h100"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return fxmem.analyze(Net(), "1024x512", **GIVEN).to_dict()


@pytest.mark.parametrize(
    ("batch", "options", "text"),
    [
        (1024, {"optimizer": "sgd"}, "the optimizer keeps no state, or had not stepped"),
        (1024, {"set_to_none": False}, "gradients are kept from step to step"),
        (2048, {}, "activations are twice as large: batch, length or precision"),
        (512, {}, "activations are half as large: batch, length or precision"),
    ],
)
def test_what_the_step_really_does_is_among_the_causes(
    report: dict[str, Any], batch: int, options: dict[str, Any], text: str
) -> None:
    real = fxmem.analyze(Net(), f"{batch}x512", **{**GIVEN, **options})
    verdict = explain_measured(report, real.peak_bytes)
    assert any(cause.text.startswith(text) for cause in verdict.causes), str(verdict)


def test_another_counter_was_read(report: dict[str, Any]) -> None:
    verdict = explain_measured(report, report["reserved_bytes"])
    assert verdict.causes[0].text == "the figure is torch.cuda.max_memory_reserved()"
    verdict = explain_measured(report, sum(report["process_bytes"]) // 2)
    assert verdict.causes[0].text == "the figure is nvidia-smi's, of the process"


def test_figures_that_are_alike_need_no_cause(report: dict[str, Any]) -> None:
    verdict = explain_measured(report, report["peak_bytes"] * 1009 // 1000)
    assert verdict.is_alike and verdict.causes == ()
    assert "The two are alike." in str(verdict)


def test_no_cause_comes_near(report: dict[str, Any]) -> None:
    verdict = explain_measured(report, 100 * report["peak_bytes"])
    assert verdict.causes == ()
    assert "No known cause makes most of the difference." in str(verdict)


def test_the_command(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main(["diff", str(path), "--measured", str(2 * report["peak_bytes"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference_bytes"] == report["peak_bytes"] and found["schema_version"] == 1
    assert main(["diff", str(path), str(path), "--measured", "1GiB"]) == 2
    assert "--measured is compared with one saved report" in capsys.readouterr().err

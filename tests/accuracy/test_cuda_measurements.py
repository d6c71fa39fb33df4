"""fxmem's numbers for CUDA against steps that were measured on GPUs.

The measurements are files; nothing here needs a GPU. ``benchmarks.cuda_accuracy`` prints the same
comparison as a table.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.cases import import_torchvision
from benchmarks.cuda_accuracy import DATA, Measurement, compare, list_measurements
from benchmarks.cuda_trace import replay_measured

ROOT = Path(__file__).parents[2]
MEASUREMENTS = [m for m in list_measurements(ROOT / DATA) if "error" not in m.result]
TRACED = [m for m in MEASUREMENTS if "trace" in m.result]
MOST = 0.01
"""The largest distance of a peak, relative."""


@pytest.mark.parametrize(
    "measurement",
    [pytest.param(m, marks=() if m in TRACED else pytest.mark.slow) for m in MEASUREMENTS],
    ids=str,
)
def test_the_peaks_are_those_measured(measurement: Measurement) -> None:
    for package in ("torchvision", "timm", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import_torchvision()
    if measurement.result["skipped"]:
        pytest.skip("the optimizer was skipped: gradients were not finite")
    row = compare(measurement)
    assert row.predicted, row.notes
    errors = {key: row.error(key) for key in ("second peak", "second requested")}
    assert {key: error for key, error in errors.items() if abs(error or 0) > MOST} == {}


@pytest.mark.parametrize("measurement", TRACED, ids=str)
def test_the_simulated_allocator_reserves_what_pytorch_reserved(measurement: Measurement) -> None:
    assert replay_measured(measurement.result["trace"]).differs_at is None

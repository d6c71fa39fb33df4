"""The measurements that need a GPU, run on the CPU: what a GPU would count is made up.

The model, its steps, the profiler and the files are real, so that no slip waits for a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import benchmarks.cuda_accuracy as accuracy
import benchmarks.cuda_measure as measure
from benchmarks.cases import Case, image
from benchmarks.cuda_cases import CUDA_CASES, CudaCase

pytestmark = [
    # A CPU build has no events of CUDA to profile.
    pytest.mark.filterwarnings("ignore:CUDA is not available"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]

ALLOCATED_BYTES, RESERVED_BYTES, REQUESTED_BYTES = 4096, 2**21, 4000


def make_case(precision: Any = "fp32", optimizer: str | None = "adam", **kwargs: Any) -> CudaCase:
    def build(batch: int) -> Case:
        return Case("tiny", lambda: nn.Linear(4, 2), (image(batch, 4),))

    return CudaCase(build, 3, precision, optimizer, **kwargs)


@pytest.fixture(autouse=True)
def _made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers what is asked of CUDA; the trace has one more event each time it is looked at."""
    events: list[dict[str, Any]] = []
    figures = {
        "allocated_bytes": ALLOCATED_BYTES,
        "reserved_bytes": RESERVED_BYTES,
        "requested_bytes": REQUESTED_BYTES,
    }
    stats = {f"{k}.all.{when}": v for k, v in figures.items() for when in ("peak", "current")}

    def look() -> dict[str, Any]:
        frames = [
            {"filename": "kernel.cpp", "line": 1, "name": "f"},
            {"filename": "/home/me/torch/nn/linear.py", "line": 7, "name": "forward"},
        ]
        events.append({"action": "alloc", "addr": 512 * len(events), "size": 24, "frames": frames})
        return {"device_traces": [list(events)]}

    def record(enabled: str | None, **_: object) -> None:
        events.clear()

    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=108, total_memory=2**34)
    answers: dict[str, Any] = {
        "memory_allocated": 0,
        "memory_reserved": RESERVED_BYTES,
        "memory_stats": stats,
        "mem_get_info": (2**34 - 2**29 - RESERVED_BYTES, 2**34),
        **dict.fromkeys(("reset_peak_memory_stats", "synchronize", "empty_cache")),
        "get_device_properties": properties,
        "get_device_capability": (8, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", look)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "MEMORY_DEVICE", torch.autograd.DeviceType.CPU)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "adam"), ("bf16", "adam-fused"), ("fp16", "sgd"), ("fp32", None)],
)
def test_a_step_trains_in_phases(precision: str, optimizer: str | None) -> None:
    step = measure.CudaStep(make_case(precision, optimizer))
    weight = step.model.weight.detach().clone()
    phases = []
    for phase in step.run():
        phases.append(phase)
        assert (step.model.weight.grad is not None) == (phase != "forward")
    trains = optimizer is not None
    assert phases == (["forward", "backward", "optimizer"] if trains else ["forward"])
    assert torch.equal(weight, step.model.weight) != trains
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert step.output.dtype == expected
    step.release()
    assert step.output is step.loss is step.model.weight.grad is None


def test_peaks_are_those_of_each_phase() -> None:
    result = measure.measure_case(make_case())
    peaks = {"peak_bytes": ALLOCATED_BYTES, "peak_requested_bytes": REQUESTED_BYTES}
    phase = {**peaks, "allocated_bytes": ALLOCATED_BYTES, "reserved_bytes": RESERVED_BYTES}
    phases = dict.fromkeys(("forward", "backward", "optimizer"), phase)
    step = {**peaks, "peak_reserved_bytes": RESERVED_BYTES, "phases": phases}
    zeros = dict.fromkeys(("before_bytes", "model_and_inputs_bytes", "between_steps_bytes"), 0)
    others = {"outside_the_allocator_bytes": 2**29, "skipped": False}
    assert result == {"first": step, "second": step, **zeros, **others}


def test_a_trace_has_its_marks_and_its_operators() -> None:
    trace = measure.trace_case(make_case("bf16"))
    parts = ("forward", "backward", "optimizer")
    names = [f"step {n}{p}" for n in (1, 2) for p in ("", *(f" {part}" for part in parts))]
    assert trace["marks"] == {"begin": 0, **dict(zip(names, range(1, 9), strict=True))}
    assert trace["lines"] == ["torch/nn/linear.py:7"]
    assert [event[0] for event in trace["events"]] == ["alloc"] * 9
    # Forward's output: 3 x 2 of bfloat16, in a block of 64 bytes or less on the CPU.
    allocated = {tuple(o["operators"]) for o in trace["operators"] if o["nbytes"] > 0}
    assert any("aten::addmm" in names for names in allocated)


def test_what_is_measured_is_what_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = make_case("bf16", traced=True), make_case(optimizer=None)
    for module in (measure, accuracy):
        monkeypatch.setattr(module, "CUDA_CASES", cases)
    monkeypatch.setattr(sys, "argv", ["cuda_measure", "--out", str(tmp_path)])
    measure.main()
    assert capsys.readouterr().out.count(f"{ALLOCATED_BYTES} {RESERVED_BYTES}\n") == 2
    measure.main()  # what is there is left alone
    assert capsys.readouterr().out == ""

    rows = [accuracy.compare(m) for m in accuracy.list_measurements(tmp_path)]
    assert [row.measurement.name for row in rows] == ["tiny-b3-bf16-adam", "tiny-b3-fp32-infer"]
    assert all(set(row.predicted) == set(row.measured) for row in rows)
    # The workspace of cuBLAS alone is more than what was made up.
    error = rows[0].error("second peak")
    assert error is not None and error > 1000
    assert accuracy.trace(rows[1].measurement).endswith("no events were written down")
    text = accuracy.trace(rows[0].measurement)
    assert "before the second step" in text and "torch/nn/linear.py:7" in text


def test_what_went_wrong_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SCALE", 2.0**17)  # more than float16 can hold: steps are skipped
    assert measure.measure_case(make_case("fp16"))["skipped"]
    monkeypatch.setattr(measure, "measure_case", lambda *_: 1 // 0)
    found = measure._measure_or_explain(make_case())
    assert found["error"].endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CUDA_CASES}) == len(CUDA_CASES)
    assert sum(case.traced for case in CUDA_CASES) >= 12


def test_memory_belongs_to_the_operators_that_run_around_it_in_its_thread() -> None:
    spans = [(0, 100, 1, "outer"), (10, 50, 1, "inner"), (60, 90, 1, "later"), (0, 30, 2, "other")]
    memory = [(5, 1, 1), (20, 1, 2), (20, 2, 3), (55, 1, 4), (70, 1, 5), (95, 1, 6), (40, 2, 7)]
    found = [event["operators"] for event in measure._attribute(sorted(spans), sorted(memory))]
    assert found == [
        ["outer"],
        ["outer", "inner"],
        ["other"],
        [],  # in the other thread, after its only operator
        ["outer"],
        ["outer", "later"],
        ["outer"],
    ]

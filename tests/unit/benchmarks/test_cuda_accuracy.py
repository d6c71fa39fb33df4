"""The comparison with measured steps, on measurements and graphs made by hand."""

from __future__ import annotations

import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hand_made import MIB, add_first_step, make_graph
from torch import nn

import benchmarks.cuda_accuracy as accuracy
from benchmarks.cases import Case, image
from benchmarks.cuda_cases import CudaCase
from benchmarks.cuda_trace import (
    BEFORE,
    Replay,
    describe_replay,
    describe_trace,
    replay_measured,
)
from fxmem.analysis import Analysis
from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Storage
from fxmem.kernels.cuda.gpu import Gpu, current_gpu
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.setup import Setup
from fxmem.training.options import resolve_device

GPU = {"gpu": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
MACHINE = {"schema": accuracy.SCHEMA, "torch": "2.13.0", "cudnn": 91002, **GPU}

# An input of 1 MiB and a ReLU's output of 1 MiB: two small blocks, in one segment of 2 MiB.
RELU = CudaCase(lambda b: Case("relu", nn.ReLU, (image(b, 1024),)), 256, optimizer=None)
STEP = {
    **{f"peak_{kind}bytes": 2 * MIB for kind in ("", "requested_", "reserved_")},
    "phases": {"forward": {"allocated_bytes": 2 * MIB}},
}
MEASURED: dict[str, Any] = {
    "name": RELU.name,
    "first": STEP,
    "second": STEP,
    "skipped": False,
    "before_bytes": 0,
    "between_steps_bytes": MIB,
    "outside_the_allocator_bytes": 400 * MIB,
}

# Step 1 leaves what was there before it; step 2 takes a kernel's scratch that fxmem leaves out, and
# the profiler sees blocks, of which the last has slack.
TRACE: dict[str, Any] = {
    "marks": {"begin": 0, "step 1": 2, "step 1 forward": 4, "step 2": 6, "step 2 forward": 12},
    "events": [
        ["segment_alloc", 0x1000, 2 * MIB, 0],
        ["alloc", 0x1000, MIB, 0],
        ["alloc", 0x101000, 1000, 1],
        ["free_requested", 0x101000, 1000, 1],
        ["free_completed", 0x101000, 1000, 1],
        ["snapshot", 0, 0, 0],
        ["alloc", 0x101000, 1000, 1],
        ["alloc", 0x102000, 768, 2],
        ["free_completed", 0x102000, 768, 2],
        ["segment_alloc", 0x900000, 20 * MIB, 2],
        ["alloc", 0x900000, 9 * MIB, 2],
        ["free_completed", 0x900000, 9 * MIB, 2],
    ],
    "lines": ["", "torch/nn/relu.py:5", "net.py:7"],
    "operators": [
        {"nbytes": 1024, "operators": ["aten::relu", "aten::clamp_min"]},
        {"nbytes": 1024, "operators": ["aten::sort"]},
        {"nbytes": -1024, "operators": ["aten::sort"]},
        {"nbytes": 9 * MIB + 4096, "operators": []},
    ],
}


def make_traced_graph() -> MemoryGraph:
    """Predicts the step of the trace, without the sort's scratch."""
    names = ("step.begin", "aten.relu", "aten.topk")
    operations = tuple(Operation(index, name, Phase.FORWARD) for index, name in enumerate(names))
    lives = ((MIB, RESIDENT, None), (1000, 1, None), (9 * MIB, 2, 2))
    storages = tuple(
        Storage(index, nbytes, Category.OUTPUT, "", (), "float32", born, died)
        for index, (nbytes, born, died) in enumerate(lives)
    )
    return MemoryGraph((), storages, operations, (), ((0, MIB), (-5, 1000), (-5, -1000)))


def write(folder: Path, **result: object) -> None:
    (folder / "a-gpu").mkdir()
    (folder / "a-gpu" / "machine.json").write_text(json.dumps(MACHINE))
    with gzip.open(folder / "a-gpu" / "case.json.gz", "wb") as file:
        file.write(json.dumps({**MEASURED, **result}).encode())


def run(monkeypatch: pytest.MonkeyPatch, data: Path, *arguments: str) -> None:
    monkeypatch.setattr(accuracy, "CUDA_CASES", (RELU,))
    monkeypatch.setattr(sys, "argv", ["cuda_accuracy", "--data", str(data), *arguments])
    accuracy.main()


def test_without_measurements_it_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path)
    assert capsys.readouterr().out == f"{accuracy.NO_DATA}\n"
    assert find_spec(accuracy.NO_DATA.split("python -m ")[1].split()[0])


def test_a_measured_case_is_predicted_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = {**STEP, "peak_bytes": 4 * MIB}
    write(tmp_path, first=first)
    page = tmp_path / "page.md"
    run(monkeypatch, tmp_path, "-o", str(page))
    text = page.read_text()
    assert "## NVIDIA H200, torch 2.13.0, cuDNN 91002" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {RELU.name}"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *[RELU.name, "2.00", "-50.000", "0", "0", "0", "0", "0", "0", "-", "-", "400"],
        "",
    ]
    assert "| first peak       | 50.000     | 0/1     | -50.000 (relu-b256-fp32-infer) |" in text


def test_what_was_there_before_is_not_the_cases_own() -> None:
    alone = accuracy.list_measured_figures(MEASURED)
    after = accuracy.list_measured_figures({**MEASURED, "before_bytes": 512})
    own = {name for name in alone if alone[name] != after[name]}
    assert own == {name for name in alone if not name.endswith("reserved")}
    assert {alone[name] - after[name] for name in own} == {512}


def test_a_step_without_its_optimizer_is_not_compared(tmp_path: Path) -> None:
    write(tmp_path, skipped=True)
    (row,) = map(accuracy.compare, accuracy.list_measurements(tmp_path))
    assert not row.predicted and row.notes[0].startswith("not compared: gradients")


@pytest.mark.parametrize("error", ["", "Traceback\n  ...\nOutOfMemoryError: full\n"])
def test_a_case_that_fails_is_a_row_with_its_reason(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, **({"error": error} if error else {}))
    wrong = CudaCase(
        lambda b: Case("relu", lambda: nn.Linear(3, 3), (image(b, 1024),)), 256, optimizer=None
    )
    monkeypatch.setattr(accuracy, "CUDA_CASES", (wrong,))
    row = accuracy.compare(*accuracy.list_measurements(tmp_path))
    assert row.error("second peak") is None
    reason = "not measured: OutOfMemoryError: full" if error else "TraceError: "
    assert row.notes[0].startswith(reason)
    assert error or row.measured["second peak"] == 2 * MIB


def test_measurements_of_another_schema_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    machine = {**MACHINE, "schema": -1}
    (tmp_path / "a-gpu" / "machine.json").write_text(json.dumps(machine))
    with pytest.raises(ValueError, match="schema -1"):
        accuracy.list_measurements(tmp_path)


def test_the_gpu_is_the_measured_one() -> None:
    with accuracy.use_machine(MACHINE):
        gpu = resolve_device("cuda", None, None, None, None).architecture
    assert gpu == Gpu((9, 0), 91002, 132, 2048)
    assert current_gpu() == Gpu()


def test_figures_are_those_of_both_steps_and_of_each_phase() -> None:
    setup = Setup("Net", (), "train", "cuda", None, None, "fx")
    graph = add_first_step(make_graph(), state_mib=1)
    analysis = Analysis(setup, graph, AllocatorSettings())
    # After backward there are besides what was there (13 MiB, in a large segment and a small one)
    # an output of 1 MiB, a loss of 4 bytes and a gradient of 4 MiB.
    assert accuracy.list_predicted_figures(analysis) == {
        "first peak": 19 * MIB,
        "first requested": 19 * MIB,
        "first reserved": 22 * MIB,
        "second peak": 30 * MIB + 512,
        "second requested": 30 * MIB + 4,
        "second reserved": 44 * MIB,
        "between steps": 13 * MIB,
        "forward": 18 * MIB + 512,
        "backward": 18 * MIB + 512,
        "optimizer": 18 * MIB + 512,
    }


def test_the_description_names_the_scratch_that_is_missing() -> None:
    text = describe_trace(TRACE, make_traced_graph())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [BEFORE, "3", "3", "3", "0"] in rows
    assert ["forward", "5", "3", "1", "1"] in rows
    assert ["1", "forward", "768", "aten::sort (net.py:7)", "-", ""] in rows
    assert "after each of 8 measured events" in text


def test_the_simulated_allocator_is_told_from_the_recording() -> None:
    assert replay_measured(TRACE) == Replay(8, None, 22 * MIB, 22 * MIB)
    other = {**TRACE, "events": [["segment_alloc", 0x1000, 4 * MIB, 0], *TRACE["events"][1:]]}
    found = replay_measured(other)
    assert found == Replay(8, 0, 22 * MIB, 24 * MIB)
    assert describe_replay(found).endswith("they part at event 0.")


def test_a_trace_is_compared_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, trace=TRACE)
    run(monkeypatch, tmp_path, "--trace", RELU.name)
    assert "| forward" in capsys.readouterr().out
    run(monkeypatch, tmp_path, "--trace", "another")
    assert capsys.readouterr().out == "no case is called another\n\n"

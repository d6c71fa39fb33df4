"""Snapshots of a GPU aligned with a predicted step, and faults that are found in them."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fxmem
from fxmem.cli import main
from fxmem.comparison.aligning import align_snapshot
from fxmem.comparison.alignment import Alignment, Difference
from fxmem.comparison.snapshot import read_snapshot
from fxmem.errors import UsageError
from tests.support.snapshots import join_steps, write

MIB = 1 << 20
SCRIPT = """
import sys, torch
from torch import nn

fault = sys.argv[1]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(512, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
history, held = [], None
for step in range(5):
    x = torch.randn(1024, 512, device="cuda")
    y = torch.randint(0, 4096, (1024,), device="cuda")
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    if fault == "leak":
        history.append(out.detach()[:, :1024].clone())
    if fault == "held":
        held = torch.softmax(out.detach(), -1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def find_line(text: str) -> int:
    return next(at for at, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


@cache
def record(folder: Path, fault: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Records the script with a fault: its report, and the snapshot that PyTorch would write."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run = fxmem.run(str(script), [fault], gpu="h100", steps=4)
    return run.to_dict(), join_steps(run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def align(folder: Path, snapshot: dict[str, Any]) -> Alignment:
    report, _ = record(folder, "none")
    return align_snapshot(report, read_snapshot(write(snapshot)), ("report", "snapshot"))


def test_a_run_that_is_as_predicted(folder: Path) -> None:
    report, snapshot = record(folder, "none")
    found = align(folder, snapshot)
    assert found.share == 1 and found.differences == ()
    assert found.measured_bytes == found.predicted_bytes == report["peak_bytes"]
    assert found.place is not None and found.place.phase is fxmem.Phase.BACKWARD


def check_only(found: Alignment, kind: str, nbytes: int, count: int) -> Difference:
    assert found.share > 0.9
    (only,) = found.differences
    assert (only.kind, only.nbytes, only.count) == (kind, nbytes, count)
    assert found.measured_bytes - found.predicted_bytes == nbytes
    return only


def test_a_leak_across_steps(folder: Path) -> None:
    only = check_only(align(folder, record(folder, "leak")[1]), "leak", 16 * MIB, 4)
    assert only.source is not None and only.source.line == find_line("history.append")


def test_an_output_that_is_held(folder: Path) -> None:
    only = check_only(align(folder, record(folder, "held")[1]), "new", 16 * MIB, 1)
    assert only.source is not None and only.source.line == find_line("held = torch.softmax")


def test_a_tensor_that_is_freed_too_late(folder: Path) -> None:
    """What cross_entropy saves is alive after its backward, as where a graph is retained."""
    _, snapshot = record(folder, "none")
    snapshot = copy.deepcopy(snapshot)
    events = snapshot["device_traces"][0]
    line = find_line("cross_entropy")
    made = max(
        at
        for at, event in enumerate(events)
        if event["action"] == "alloc"
        and event["size"] == 16 * MIB
        and any(frame["line"] == line for frame in event["frames"])
    )
    address = events[made]["addr"]
    freed = ("free_completed", address)
    at = next(
        at
        for at, event in enumerate(events)
        if at > made and (event["action"], event["addr"]) == freed
    )
    for event in (events[made], events[at]):
        event["addr"] = 1 << 60  # what it has is given to others
    snapshot["device_traces"][0] = [*events[:at], *events[at + 1 :], events[at]]
    found = align(folder, snapshot)
    only = check_only(found, "held", 16 * MIB, 1)
    assert only.source is not None and only.source.line == line and "cross_entropy" in only.label


def test_another_kernel(folder: Path) -> None:
    """A kernel takes 64 MiB of scratch memory at the peak."""
    _, snapshot = record(folder, "none")
    snapshot = copy.deepcopy(snapshot)
    read = read_snapshot(write(snapshot))
    events = snapshot["device_traces"][0]
    made = [at for at, event in enumerate(events) if event["action"] == "alloc"]
    peak = made[read.peak_at]
    block = {"addr": 1 << 60, "size": 64 * MIB, "stream": 0, "frames": [], "user_metadata": ""}
    names = ("alloc", "free_requested", "free_completed")
    events[peak + 1 : peak + 1] = [{**block, "action": name} for name in names]
    check_only(align(folder, snapshot), "short", 64 * MIB, 1)


def test_a_trace_of_something_else(folder: Path) -> None:
    _, snapshot = record(folder, "none")
    snapshot = copy.deepcopy(snapshot)
    for event in snapshot["device_traces"][0]:
        event["size"] = event["size"] * 3 // 2
    found = align(folder, snapshot)
    assert found.share < 0.5 and found.differences == () and found.place is None
    assert "inputs of another size" in str(found)


class Code:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no pickle", "this is not a memory snapshot"),
        (pickle.dumps([1, 2]), "this is not a memory snapshot"),
        (pickle.dumps({"device_traces": [Code()]}), "this is not a memory snapshot"),
        (pickle.dumps({"device_traces": [[]]}), "the snapshot has no trace of allocations"),
    ],
)
def test_files_that_are_no_snapshots(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_snapshot(data)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "report.json", folder / "snapshot.pickle"
    import json

    run[0].write_text(json.dumps(record(folder, "none")[0]))
    run[1].write_bytes(write(record(folder, "leak")[1]))
    assert main(["diff", str(run[1]), str(run[0])]) == 0
    out = capsys.readouterr().out
    assert "made in one step after the other, never freed  train.py:" in out
    assert main(["diff", str(run[0]), str(run[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["kind"] == "leak"
    assert main(["diff", str(run[1])]) == 2
    assert "a snapshot is compared with one saved report" in capsys.readouterr().err

"""Sweeps: grids, rows that were there, workers that are killed, and other executors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fxmem
from fxmem.cli import main
from fxmem.errors import UsageError
from fxmem.sweeping import grid, sweep
from fxmem.sweeping.executors import connect_dask

MODEL = """
from torch import nn

def make(width):
    return nn.Linear(width, 8)
"""
GRID = """
command = "analyze net.py:make({width}) --input {batch}x{width} --device cpu --loss mse"

[grid]
width = [16, 32]
batch = [4, 1024, "x"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path


def test_rows_are_analysed_each_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "grid.toml"
    assert main(["sweep", str(path), "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert "2 of 6 rows failed." in out and "bad shape 'xx32'" in out
    rows = [json.loads(line) for line in (folder / "grid.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        width, batch = row["values"]["width"], row["values"]["batch"]
        if batch != "x":
            expected = fxmem.analyze(
                f"{folder}/net.py:make({width})", f"{batch}x{width}", device="cpu", loss="mse"
            )
            assert row["peak_bytes"] == expected.peak_bytes and row["fits"] is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces the process of a row by a figure."""
    calls: list[str] = []

    def run_row(command: str, folder: str) -> dict[str, Any]:
        calls.append(command)
        figures = dict.fromkeys(("reserved_bytes", "process_bytes", "phase", "node", "fits"))
        return {**figures, "peak_bytes": len(command), "error": ""}

    monkeypatch.setattr(sweep, "run_row", run_row)
    yield calls


def test_a_sweep_goes_on_where_it_stopped(folder: Path, calls: list[str]) -> None:
    path = folder / "many.toml"
    path.write_text(
        'command = "analyze a:b --input {n}x{m}"\n'
        f"[grid]\nn = {[*range(50)]}\nm = {[*range(10)]}\n"
    )
    found = fxmem.sweep(str(path), jobs=2)
    assert len(found.rows) == len(calls) == 500 and not found.failed
    assert [row["values"]["m"] for row in found.rows[:11]] == [*map(str, range(10)), "0"]
    kept = path.with_suffix(".jsonl")
    lines = kept.read_text().splitlines()
    failed = json.dumps({**json.loads(lines[0]), "error": "killed"})
    kept.write_text("\n".join([failed, *lines[1:400], lines[400][:30]]))  # as it was stopped
    calls.clear()
    assert fxmem.sweep(str(path), jobs=2).rows == found.rows
    assert len(calls) == 101 and len({*calls}) == 101
    calls.clear()
    assert fxmem.sweep(str(path)).rows == found.rows and not calls


def test_a_worker_that_is_killed_starts_again(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import os, pathlib\n"
        "marker = pathlib.Path('killed')\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), 9)\n" + MODEL
    )
    command = "analyze net.py:make(16) --input 4x16 --device cpu"
    assert grid.run_row(command, str(folder))["error"] == ""
    (folder / "net.py").write_text("import os\nos.kill(os.getpid(), 9)\n" + MODEL)
    assert grid.run_row(command, str(folder)) == {"error": "killed by signal 9, twice"}


class Lost(ThreadPoolExecutor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        def lose() -> None:
            raise RuntimeError("the worker is gone")

        return super().submit(lose)


def test_a_row_without_a_result_is_one_that_failed(folder: Path) -> None:
    found = fxmem.sweep(str(folder / "grid.toml"), executor=Lost())
    assert {row["error"] for row in found.rows} == {"RuntimeError: the worker is gone"}


def test_any_executor_runs_the_rows(folder: Path, calls: list[str]) -> None:
    with ThreadPoolExecutor(1) as executor:
        found = fxmem.sweep(str(folder / "grid.toml"), executor=executor)
    assert len(found.rows) == len(calls) == 6


SUBMITIT = """
import submitit
import fxmem
from fxmem.sweeping.executors import SubmititExecutor

executor = SubmititExecutor(submitit.AutoExecutor(folder="logs", cluster="local"))
print(fxmem.sweep("grid.toml", executor=executor).to_json())
"""
DASK = """
import distributed
from fxmem.cli import main

with distributed.LocalCluster(
    n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
) as cluster:
    main(["sweep", "grid.toml", "--scheduler", cluster.scheduler_address, "--json"])
"""


@pytest.mark.parametrize(("package", "code"), [("submitit", SUBMITIT), ("distributed", DASK)])
def test_clusters_run_the_rows(folder: Path, package: str, code: str) -> None:
    """In a process of its own: threads of a cluster go on, and draw random numbers."""
    pytest.importorskip(package)
    (folder / "grid.toml").write_text(GRID.replace(', "x"', "").replace("16, 32", "16"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
    assert [bool(row["peak_bytes"]) for row in rows] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command = 1", "is no grid"),
        ('command = "analyze a:b"', "is no grid"),
        ('command = "analyze {n}"\n[grid]\n', r"\[grid\] has no 'n'"),
        ('command = "analyze a:b"\n[grid]\nn = [1]', "the command does not use 'n'"),
        ('command = "analyze {n}"\n[grid]\nn = 1', "n must be a list of values"),
        ('command = "plan {n}"\n[grid]\nn = [1]', "the command must be analyze or run"),
        ('command = "analyze {n"\n[grid]\nn = [1]', "in the command"),
        ("command = ", "Invalid value"),
    ],
)
def test_files_that_are_no_grids(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        grid.read_grid(str(path))
    with pytest.raises(UsageError, match="cannot read the grid"):
        grid.read_grid(str(tmp_path / "none.toml"))


def test_a_file_of_something_else_is_left_alone(folder: Path) -> None:
    (folder / "grid.jsonl").write_text("a\nb\n")
    with pytest.raises(UsageError, match="is no file of a sweep"):
        fxmem.sweep(str(folder / "grid.toml"))
    assert (folder / "grid.jsonl").read_text() == "a\nb\n"


def test_packages_of_clusters_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match="distributed is not installed"):
        connect_dask("tcp://127.0.0.1:1")

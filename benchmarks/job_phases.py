"""Compares the phases of training scripts with what the real scripts allocate.

    python -m benchmarks.job_phases [NAME ...] [-o docs/results/job_phases.md]

Each script of ``benchmarks/jobs`` runs twice on the CPU, the second time from its checkpoint and
under PyTorch's profiler, which sees every allocation and free. Its own marks say when it loads and
evaluates; it saves within ``torch.save`` and ``safetensors.torch.save_file``.
``fxmem run --device cpu --until save`` then runs from the same checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from tabulate import tabulate
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import import_torchvision
from benchmarks.measure import THREADS
from benchmarks.stamp import put_page, write_stamp
from fxmem.graph import Phase

FOLDER = Path(__file__).parent / "jobs"
_METHOD = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip().replace("``", "`")
PHASES = ("loading", "steps", "evaluation", "saving")


def measure_phases(path: str, arguments: list[str]) -> dict[str, int]:
    """Runs a script on the CPU and measures the peak of each phase, in bytes."""
    handle = register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    argv, sys.argv = sys.argv, [path, *arguments]
    gc.disable()
    savers = [(torch, "save"), (safetensors.torch, "save_file")]
    marks = [
        mock.patch.object(owner, name, record_function("saving")(getattr(owner, name)))
        for owner, name in savers
    ]
    with (
        marks[0],
        marks[1],
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv = argv
            handle.remove()
            gc.enable()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() in PHASES
    ]
    memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    memory += [(start, 0) for start, _, _ in spans]  # what there is when a phase begins
    memory.sort(key=lambda event: event[0])
    peaks, live = dict.fromkeys(PHASES, 0), 0
    for at, nbytes in memory:
        within = (name for start, stop, name in spans if start <= at <= stop)
        phase = next(within, "steps")
        peaks[phase] = max(peaks[phase], live, live + nbytes)
        live += nbytes
    return peaks


def predict_phases(path: str, arguments: list[str]) -> dict[str, int]:
    """Records a script until it has saved, and returns the peak of each phase in bytes."""
    import fxmem

    run = fxmem.run(path, arguments, device="cpu", until="save")
    steps = max(step.peak_bytes for step in run.steps)
    apart = {name: run.find_largest(Phase(name)) for name in PHASES if name != "steps"}
    return {"steps": steps} | {name: each.peak_bytes if each else 0 for name, each in apart.items()}


def compare_job(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Measures and predicts a job that resumes, in a process each."""
    with tempfile.TemporaryDirectory() as folder:
        made, kept = Path(folder) / "made", Path(folder) / "kept"
        found: list[dict[str, int]] = []
        for what in ("real", "real", "fxmem"):
            if kept.is_dir():
                shutil.rmtree(made)
                shutil.copytree(kept, made)
            elif kept.exists():
                shutil.copy(kept, made)
            command = [sys.executable, "-m", "benchmarks.job_phases", "--only", what, name]
            done = subprocess.run(
                [*command, "--checkpoint", str(made)], stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            if not kept.exists() and made.exists():
                shutil.copytree(made, kept) if made.is_dir() else shutil.copy(made, kept)
    return found[1], found[2]


def write_page(rows: list[tuple[Any, ...]]) -> str:
    """Writes the results."""
    headers = ["job", "phase", "measured, bytes", "fxmem, bytes", "differs by"]
    table = tabulate(rows, headers, tablefmt="github", intfmt=",", disable_numparse=[4])
    stamp = write_stamp("python -m benchmarks.job_phases")
    return "\n\n".join(("# Phases of jobs", _METHOD, table, stamp)) + "\n"


def main() -> None:
    """Prints or writes a table with a row for each phase of each job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--only", choices=["real", "fxmem"])
    parser.add_argument("--checkpoint")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.only is not None:
        torch.set_num_threads(THREADS)
        import_torchvision()
        find = measure_phases if arguments.only == "real" else predict_phases
        path = str(FOLDER / f"{arguments.names[0]}.py")
        print("\n" + json.dumps(find(path, ["cpu", arguments.checkpoint])))
        return
    names = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
    rows = []
    for name in arguments.names or names:
        measured, found = compare_job(name)
        for phase in PHASES:
            share = found[phase] / measured[phase] - 1
            rows.append((name, phase, measured[phase], found[phase], f"{share:+.3%}"))
        print(tabulate(rows[-len(PHASES) :], intfmt=","), file=sys.stderr)
    put_page(write_page(rows), arguments.output)


if __name__ == "__main__":
    main()

"""Runs fxmem over whole model libraries, and tells which tracer served or why none did.

    python -m benchmarks.coverage [--suite torchvision] [--only NAME ...] [-j 2] [-o FILE]

Each model is analysed for both target devices, cuda and cpu; no GPU is needed. Models are built on
the meta device where they allow that, so size costs nothing. Workers are separate processes: a
model that hangs or kills its process is a row, not the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.cases import Case
from benchmarks.libraries import SUITES, suite_cases
from benchmarks.stamp import put_page, write_stamp

COMMAND = "python -m benchmarks.coverage -o docs/results/coverage.md"
DEVICES = ("cuda", "cpu")
TIMEOUT_S = 300.0
Outcome = dict[str, Any]


class EmptyOnMeta(TorchFunctionMode):
    """Puts what `torch.empty` makes on the meta device: parameters, and little else."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the function, on the meta device if it is `torch.empty`."""
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(case: Case) -> tuple[nn.Module, str]:
    """Builds the model on the meta device, as far as its constructor allows.

    Returns:
        The model, and what is on that device: `all`, its `parameters` or `nothing`.
    """
    attempts = {"all": torch.device("meta"), "parameters": EmptyOnMeta()}
    for what, where in attempts.items():
        try:
            with where:
                return case.model(), what
        except Exception:  # constructors that compute fail on meta tensors in every way
            continue
    return case.model(), "nothing"


def analyse(case: Case) -> Outcome:
    """Runs fxmem in train mode on one case and describes what came of it, for each device."""
    outcome: Outcome = {"name": case.name}
    try:
        model, outcome["meta"] = build(case)
    except Exception as error:
        return outcome | {"status": "unbuildable", "cause": one_line(error)}
    args, kwargs = case.inputs()
    outcome["status"] = "built"
    return outcome | {device: analyse_on(device, model, args, kwargs) for device in DEVICES}


def analyse_on(
    device: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome:
    """Runs fxmem for one target device."""
    import fxmem

    start = time.perf_counter()
    try:
        analysis = fxmem.analyze(model, args, kwargs, mode="train", device=device)
        outcome: Outcome = {
            "status": "analysed",
            "frontend": str(analysis.frontend),
            "peak_bytes": int(analysis.peak_bytes),
            "cause": analysis.setup.frontend_reason,
        }
    except fxmem.FxmemError as error:
        outcome = {"status": "refused", "cause": one_line(error)}
    except Exception as error:
        traceback.print_exc()
        outcome = {"status": "crashed", "cause": one_line(error)}
    return outcome | {"seconds": time.perf_counter() - start}


def one_line(error: BaseException) -> str:
    """Returns the type and the first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def work() -> None:
    """Serves names from stdin: one JSON line on stdout for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what models print must not mix with results
        cases = {case.name: case for suite in SUITES for case in suite_cases(suite)}
        print("ready", file=results, flush=True)
        for line in sys.stdin:
            print(json.dumps(analyse(cases[line.strip()])), file=results, flush=True)


class Worker:
    """A process that analyses one model after the other, started anew when it dies or hangs."""

    def __init__(self, timeout_s: float) -> None:
        """Starts nothing until the first model comes."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.coverage", "--worker"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)  # the process has ended

        threading.Thread(target=read, daemon=True).start()
        self._process, self._lines = process, lines
        if self._lines.get() != "ready\n":
            raise RuntimeError("a worker did not start; run with --worker to see why")
        return process

    def run(self, name: str) -> Outcome:
        """Analyses one model."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self.stop()
            cause = f"no result after {self._timeout_s:.0f} s"
            return {"name": name, "status": "timed out", "cause": cause}
        if line is None:
            code = process.wait()
            self.stop()
            return {"name": name, "status": "died", "cause": f"exit code {code}"}
        return dict(json.loads(line))

    def stop(self) -> None:
        """Ends the process; the next model starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def run_all(names: Sequence[str], jobs: int, timeout_s: float) -> Iterator[Outcome]:
    """Analyses all models with that many workers; yields in the order of `names`."""
    idle: queue.Queue[Worker] = queue.Queue()
    workers = [Worker(timeout_s) for _ in range(jobs)]
    for worker in workers:
        idle.put(worker)

    def run(name: str) -> Outcome:
        worker = idle.get()
        try:
            return worker.run(name)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, names)
    finally:
        for worker in workers:
            worker.stop()


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns all models of a suite as a Markdown table."""

    def cell(outcome: Outcome, key: str, show: Callable[[Any], str] = str) -> str:
        return show(outcome[key]) if outcome.get(key) is not None else "-"

    rows = []
    for outcome in outcomes:
        sides = [outcome.get(device, outcome) for device in DEVICES]
        cause = next((side["cause"] for side in sides if side.get("cause")), "")
        rows.append(
            [
                outcome["name"].split("/", 1)[1],
                *(side["status"] for side in sides),
                cell(sides[0], "frontend"),
                *(cell(side, "peak_bytes", lambda n: f"{n / 2**20:.1f}") for side in sides),
                cell(sides[0], "seconds", lambda s: f"{s:.1f}"),
                cell(outcome, "meta"),
                cause.replace("|", "/").replace("\n", " ")[:200],
            ]
        )
    headers = [
        "model",
        *(f"on {device}" for device in DEVICES),
        "by",
        *(f"peak MiB, {device}" for device in DEVICES),
        "s",
        "on meta",
        "cause (of the second tracer)",
    ]
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns what share of each suite is analysed for each device, and served by fx."""
    rows: list[list[str]] = []
    for suite in SUITES:
        ours = [o for o in outcomes if o["name"].startswith(f"{suite}/")]
        built = [o for o in ours if o["status"] != "unbuildable"]
        for device in DEVICES if built else ():
            sides = [o.get(device, o) for o in built]
            done = [side for side in sides if side["status"] == "analysed"]
            fx = sum(side["frontend"] == "fx" for side in done)
            refused = sum(side["status"] == "refused" for side in sides)
            seconds = [side["seconds"] for side in done] or [0.0]
            rows.append(
                [
                    suite,
                    device,
                    str(len(built)),
                    f"{len(done)} ({len(done) / len(built):.0%})",
                    f"{fx} ({fx / len(built):.0%})",
                    str(refused),
                    str(len(built) - len(done) - refused),
                    f"{statistics.median(seconds):.2f}",
                    f"{max(seconds):.1f}",
                ]
            )
    headers = ["suite", "device", "models", "analysed", "by fx", "refused", "failed"]
    headers += ["median s", "worst s"]
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def render(outcomes: Sequence[Outcome], stamp: str) -> str:
    """Returns the whole report."""
    parts = [
        "# Coverage",
        stamp,
        "fxmem over model libraries, in train mode, for each target device. `refused` is fxmem's"
        " own error with its cause; `failed` is anything else. Tracer, seconds and cause in the"
        f" tables of models are those for {DEVICES[0]} unless only {DEVICES[1]} has a cause.",
        summary(outcomes),
    ]
    for suite in SUITES:
        ours = [o for o in outcomes if o["name"].startswith(f"{suite}/")]
        if ours:
            parts += [f"## {suite}", table(ours)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs the suites and prints the report, or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, nargs="+", help="these suites alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models alone")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a model")
    parser.add_argument("-o", "--output", type=Path, help="write Markdown there, not to stdout")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    names = [case.name for suite in options.suite or SUITES for case in suite_cases(suite)]
    if options.only:
        names = [n for n in names if n in options.only or n.split("/", 1)[1] in options.only]
    outcomes: list[Outcome] = []
    for outcome in run_all(names, options.jobs, options.timeout):
        outcomes.append(outcome)
        sides = [outcome.get(device, outcome) for device in DEVICES]
        words = [f"{side['status']} {side.get('cause') or ''}" for side in sides]
        print(f"{outcome['name']:40s} {'; '.join(words)}", file=sys.stderr, flush=True)
    text = render(outcomes, write_stamp(COMMAND))
    put_page(text, options.output)


if __name__ == "__main__":
    main()

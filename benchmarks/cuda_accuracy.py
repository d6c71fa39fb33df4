"""Compares fxmem's numbers with steps that were measured on GPUs; needs no GPU itself.

    python -m benchmarks.cuda_accuracy [--only PATTERN] [--jobs N] [-o FILE]
    python -m benchmarks.cuda_accuracy --trace NAME

What was measured comes from `benchmarks.cuda_measure` and lies in tests/data/cuda. `--trace`
compares a case's allocations one by one, and names the operators of those that differ.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.accuracy import percent
from benchmarks.cases import import_torchvision
from benchmarks.cuda_cases import CUDA_CASES, CudaCase
from benchmarks.cuda_measure import SCHEMA, Result
from benchmarks.cuda_trace import describe_trace
from benchmarks.stamp import put_page, write_time
from fxmem.analysis import Analysis
from fxmem.gpus import find_gpu
from fxmem.graph import Phase
from fxmem.kernels.cuda.gpu import Gpu, count_threads
from fxmem.memory.allocation import list_events, replay
from fxmem.training import options

DATA = Path("tests/data/cuda")
NO_DATA = "Nothing was measured yet: run python -m benchmarks.cuda_measure on a machine with a GPU."
MIB = 2**20
OPTIMIZERS = {None: None, "sgd": "sgd", "adam": "adam", "adam-fused": "adam(fused=True)"}
PHASES = {
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
}
"""The phases of a measurement, by those of a recording."""

Figures = dict[str, int]
"""Bytes by what they are: ``second peak``, ``backward``."""


@dataclass(frozen=True)
class Measurement:
    """A measured case: its machine, and what was found or the ``error`` that came."""

    name: str
    machine: Result
    result: Result

    def __str__(self) -> str:
        return f"{self.machine['gpu']}, torch {self.machine['torch']}: {self.name}"


@dataclass(frozen=True)
class Row:
    """The comparison of one measurement; without figures where there is nothing to compare."""

    measurement: Measurement
    measured: Mapping[str, int]
    predicted: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def error(self, key: str) -> float | None:
        """By how much the prediction is too high, relative; None where either is missing."""
        real, ours = self.measured.get(key), self.predicted.get(key)
        return ours / real - 1 if real and ours is not None else None


def list_measurements(data: Path = DATA) -> list[Measurement]:
    """All that was measured, machine by machine, case by case."""
    found = []
    for about in sorted(data.glob("*/machine.json")):
        machine = json.loads(about.read_text())
        if machine["schema"] != SCHEMA:
            raise ValueError(f"{about.parent} has schema {machine['schema']}, not {SCHEMA}")
        for path in sorted(about.parent.glob("*.json.gz")):
            result = json.loads(gzip.decompress(path.read_bytes()))
            found.append(Measurement(result["name"], machine, result))
    return found


def find_case(name: str) -> CudaCase:
    """The case of that name."""
    return next(case for case in CUDA_CASES if case.name == name)


def build_model(name: str) -> nn.Module:
    """The model of a case; fxmem calls it where parameters take no memory."""
    case = find_case(name)
    model = case.build(case.batch).model()
    case.compile_model(model)
    return model


@contextmanager
def use_machine(machine: Result) -> Iterator[None]:
    """Predicts for the very GPU and cuDNN that a measurement was made with."""
    capability = (machine["capability"][0], machine["capability"][1])
    gpu = Gpu(
        capability=capability,
        cudnn_version=machine["cudnn"],
        multiprocessors=machine["multiprocessors"],
        threads_per_multiprocessor=count_threads(capability),
        model=find_gpu(machine["gpu"]),
    )
    with mock.patch.object(options, "describe_gpu", lambda _: gpu):
        yield


def predict(name: str, machine: Result) -> Analysis:
    """Analyses a case as it was measured."""
    case = find_case(name)
    args, kwargs = case.build(case.batch).inputs()
    with use_machine(machine):
        return fxmem.analyze(
            f"{__name__ if __name__ != '__main__' else 'benchmarks.cuda_accuracy'}"
            f":build_model(name={name!r})",
            args,
            kwargs,
            mode="infer" if case.optimizer is None else "train",
            device="cuda",
            autocast=None if case.precision == "fp32" else case.precision,
            optimizer=OPTIMIZERS[case.optimizer],
            alloc_conf="",
            activation_memory_budget=case.activation_memory_budget,
        )


def list_measured_figures(result: Result) -> Figures:
    """Lists the figures of a measurement, under the names of :func:`list_predicted_figures`."""
    figures = {
        f"{step} {kind}": result[step][key]
        for step in ("first", "second")
        for kind, key in (
            ("peak", "peak_bytes"),
            ("requested", "peak_requested_bytes"),
            ("reserved", "peak_reserved_bytes"),
        )
    }
    figures["between steps"] = result["between_steps_bytes"]
    for phase, values in result["second"]["phases"].items():
        figures[phase] = values["allocated_bytes"]
    own = [name for name in figures if not name.endswith("reserved")]
    return figures | {name: figures[name] - result["before_bytes"] for name in own}


def list_predicted_figures(analysis: Analysis) -> Figures:
    """The same of a prediction.

    Peaks of both steps, what is allocated between them, and at the end of each phase of the
    second.
    """
    first_step = analysis.first_step
    assert first_step is not None
    events, first = list_events(analysis.graph)
    profile = replay(events, analysis.settings)
    samples = {
        "peak": profile.allocated_bytes,
        "requested": profile.requested_bytes,
        "reserved": profile.reserved_bytes,
    }
    figures = {
        "first peak": first_step.peak_bytes,
        "first requested": first_step.requested_bytes,
        "first reserved": first_step.reserved_bytes,
    }
    for kind, values in samples.items():
        figures[f"second {kind}"] = max(values[first - 1 :])
    figures["between steps"] = profile.allocated_bytes[first - 1]
    trains = any(event.phase is Phase.BACKWARD for event in events)
    after = dict.fromkeys(PHASES.values() if trains else ("forward",))
    for event, allocated in zip(events[first:], profile.allocated_bytes[first:], strict=True):
        after[PHASES[event.phase]] = allocated
    at = figures["between steps"]
    for phase, allocated in after.items():  # some allocate nothing
        at = figures[phase] = at if allocated is None else allocated
    return figures


def compare(measurement: Measurement) -> Row:
    """Predicts a measured case and compares; a failure on either side becomes a note."""
    if "error" in measurement.result:
        last = measurement.result["error"].strip().splitlines()[-1]
        return Row(measurement, {}, {}, (f"not measured: {last[:160]}",))
    measured = list_measured_figures(measurement.result)
    notes = []
    if before := measurement.result["before_bytes"]:
        notes.append(f"less {before} B that were there before")
    if measurement.result["skipped"]:
        skipped = "not compared: gradients were not finite, and the optimizer was skipped"
        return Row(measurement, measured, {}, (skipped,))
    try:
        analysis = predict(measurement.name, measurement.machine)
    except Exception as error:  # one model is a row, not the end
        line = (str(error).strip().splitlines() or [""])[0]
        return Row(measurement, measured, {}, (*notes, f"{type(error).__name__}: {line[:160]}"))
    if beyond := analysis.library_peak_bytes - analysis.peak_bytes:
        notes.append(f"libraries may take {beyond / MIB:.0f} MiB more")
    return Row(measurement, measured, list_predicted_figures(analysis), tuple(notes))


SHOWN = (
    "first peak",
    "first reserved",
    "second peak",
    "second requested",
    "second reserved",
    "between steps",
    "forward",
    "backward",
    "optimizer",
)


def make_table(rows: Iterable[Row]) -> str:
    """One line a case: the measured peak, and the errors in percent."""
    cells = []
    for row in rows:
        peak = row.measured.get("second peak")
        outside = row.measurement.result.get("outside_the_allocator_bytes")
        cells.append(
            [
                row.measurement.name,
                "-" if peak is None else f"{peak / MIB:.2f}",
                *(percent(row.error(key)) for key in SHOWN),
                "-" if outside is None else f"{outside / MIB:.0f}",
                "; ".join(row.notes).replace("|", "/"),
            ]
        )
    headers = ["case", "measured MiB", *(f"{key} %" for key in SHOWN), "outside MiB", "notes"]
    return str(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))


def summarise(rows: Sequence[Row]) -> str:
    """Median, how many are exact, and worst, of each figure."""
    lines = []
    for key in SHOWN:
        errors = [(error, row) for row in rows if (error := row.error(key)) is not None]
        if not errors:
            continue
        worst, row = max(errors, key=lambda pair: abs(pair[0]))
        median = statistics.median(abs(error) for error, _ in errors)
        lines.append(
            [
                key,
                percent(median).lstrip("+"),
                f"{sum(error == 0 for error, _ in errors)}/{len(errors)}",
                percent(worst) + (f" ({row.measurement.name})" if worst else ""),
            ]
        )
    headers = ["figure", "median %", "exact", "worst %"]
    return str(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))


LEGEND = f"""\
`{{command}}` at {{time}}.

Two steps of each model as they were measured on a GPU (`benchmarks/cuda_measure.py`), against what
fxmem predicts for that GPU on a machine without one (torch {torch.__version__}). Errors are
fxmem's, in percent of what was measured; `0` is equal to the byte.

- peak, requested, reserved: `torch.cuda.memory_stats()`, the most in that step.
- between steps, forward, backward, optimizer: what is allocated after that part of the second step.
- first: the first step of a compiled case also measures kernels, with a buffer as large as the
  GPU's second-level cache (60 MiB), which is not predicted.
- outside: what the process takes of the GPU besides, the CUDA context above all.
"""


def describe(rows: Sequence[Row]) -> str:
    """The whole page."""
    if not rows:
        return f"# CUDA accuracy\n\n{NO_DATA}\n"
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machine = row.measurement.machine
        title = f"{machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}"
        machines.setdefault(title, []).append(row)
    legend = LEGEND.format(
        command=f"python -m benchmarks.cuda_accuracy {shlex.join(sys.argv[1:])}", time=write_time()
    )
    parts = ["# CUDA accuracy", legend.rstrip()]
    for title, ours in machines.items():
        parts += [f"## {title}", summarise(ours), make_table(ours)]
    return "\n\n".join(parts) + "\n"


def trace(measurement: Measurement) -> str:
    """Compares the allocations of a traced case with those predicted."""
    if "trace" not in measurement.result:
        return f"{measurement}: no events were written down"
    analysis = predict(measurement.name, measurement.machine)
    return f"# {measurement}\n\n{describe_trace(measurement.result['trace'], analysis.graph)}"


def run_all(
    function: Callable[[Measurement], Row], measurements: Sequence[Measurement], jobs: int
) -> Iterable[Row]:
    """Calls a function for each measurement, in so many processes at once."""
    if jobs == 1:
        yield from map(function, measurements)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=import_torchvision) as pool:
        yield from pool.map(function, measurements)


def main() -> None:
    """Compares, and prints or writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name matches")
    parser.add_argument("--trace", metavar="NAME", help="the allocations of this case, one by one")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes at once")
    parser.add_argument("--data", type=Path, default=DATA, help="what was measured")
    parser.add_argument("-o", "--output", type=Path, help="write Markdown there, not to stdout")
    options = parser.parse_args()
    measurements = list_measurements(options.data)
    if not measurements:
        print(NO_DATA)
        if options.output:
            options.output.write_text(describe([]))
        return
    import_torchvision()
    if options.trace:
        wanted = [m for m in measurements if m.name == options.trace]
        text = "\n".join(map(trace, wanted)) or f"no case is called {options.trace}\n"
    else:
        wanted = [each for each in measurements if re.search(options.only, each.name)]
        rows = []
        for row in run_all(compare, wanted, options.jobs):
            rows.append(row)
            print(row.measurement, percent(row.error("second peak")), file=sys.stderr, flush=True)
        text = describe(rows)
    put_page(text, options.output)


if __name__ == "__main__":
    main()

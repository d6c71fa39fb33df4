"""Compares fxmem's peak with the CPU allocator's, one function of PyTorch at a time.

    python -m benchmarks.functions [NAME ...] [--kernels] [-o FILE]

Each function is a model of its own, whose inputs are of a size at which it is the peak itself.
`--kernels` compares every kernel of the step alone instead, as `benchmarks.kernel_workspace` does,
and prints those that differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.accuracy import analyse, peak_without_workspace, percent
from benchmarks.cases import Case
from benchmarks.catalogue.modules import all_cases
from benchmarks.kernel_workspace import Row as KernelRow
from benchmarks.kernel_workspace import run_model
from benchmarks.measure import THREADS, measure_allocator, measure_tensors
from benchmarks.stamp import put_page
from benchmarks.step import Mode

COMPARED: tuple[Mode, ...] = ("train", "infer")


@dataclass(frozen=True)
class Row:
    """One function in one mode; the errors of fxmem's peak in bytes."""

    name: str
    mode: Mode
    measured_bytes: int = 0
    error_bytes: int = 0
    tensor_error_bytes: int = 0
    without_workspace_bytes: int = 0
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative to what was measured."""
        return self.error_bytes / self.measured_bytes if self.measured_bytes else None


def compare(case: Case, mode: Mode) -> Row:
    """Measures one function and analyses it."""
    try:
        real = measure_allocator(case, mode)["peak_bytes"]
        tensors = measure_tensors(case, mode, eager_adds=True)["peak_bytes"]
    except Exception as error:
        return Row(case.name, mode, note=f"not measured: {_first_line(error)}")
    try:
        analysis = analyse(case, mode)
    except Exception as error:
        return Row(case.name, mode, real, note=f"not analysed: {_first_line(error)}")
    without = peak_without_workspace(analysis)
    return Row(
        case.name,
        mode,
        real,
        analysis.peak.nbytes - real,
        without - tensors,
        without - real,
        analysis.peak.operation.name if analysis.peak.operation else "",
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def table(rows: Sequence[Row]) -> str:
    """Returns all rows as a Markdown table."""
    cells = [
        (
            row.name,
            row.mode,
            f"{row.measured_bytes / 2**20:.3f}",
            row.error_bytes,
            percent(row.error),
            row.tensor_error_bytes,
            row.without_workspace_bytes,
            row.note.replace("|", "/"),
        )
        for row in rows
    ]
    headers = (
        "function", "mode", "measured MiB", "error B", "error %", "tensors: error B",
        "without workspace B", "peak at",
    )  # fmt: skip
    return str(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))


def summary(rows: Sequence[Row]) -> str:
    """Returns one line per mode."""
    lines = []
    for mode in COMPARED:
        errors = [
            abs(error) for row in rows if row.mode == mode and (error := row.error) is not None
        ]
        if errors:
            exact, close = sum(e == 0 for e in errors), sum(e <= 1e-3 for e in errors)
            lines.append(f"- {mode}: {exact} of {len(errors)} equal, {close} within 0.1 %")
    return "\n".join(lines)


def compare_kernels(case: Case) -> None:
    """Prints the kernels of a function whose workspace or outputs differ."""
    rows: dict[str, KernelRow] = defaultdict(KernelRow)
    args, kwargs = case.inputs()
    for train in (True, False):
        try:
            run_model(lambda: (case.model(), args, dict(kwargs)), train, rows, case.name)
        except Exception as error:
            print(f"{case.name}: {_first_line(error)}")
    for operator, row in rows.items():
        if row.wrong:
            print(f"{operator:44} {row.worst_bytes:10}  {row.worst}")
        for layout in sorted(row.layouts)[:1]:
            print(f"{operator:44} layout      {case.name}: {layout}")
    sys.stdout.flush()


def main() -> None:
    """Runs the comparison and prints it, or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="functions; default all")
    parser.add_argument("--kernels", action="store_true", help="compare every kernel alone")
    parser.add_argument("-o", "--output", type=Path, help="write Markdown there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")
    cases = all_cases()
    rows: list[Row] = []
    for name in options.names or cases:
        if options.kernels:
            compare_kernels(cases[name])
            continue
        for mode in COMPARED:
            rows.append(compare(cases[name], mode))
            row = rows[-1]
            print(
                f"{name:24s} {mode:6s} {row.error_bytes:+10d} {percent(row.error):>9s}"
                f" tensors {row.tensor_error_bytes:+10d} {row.note}",
                file=sys.stderr,
                flush=True,
            )
        gc.collect()
    if options.kernels:
        return
    text = f"# Functions\n\n{summary(rows)}\n\n{table(rows)}\n"
    put_page(text, options.output)


if __name__ == "__main__":
    main()

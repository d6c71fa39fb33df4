"""Holds models with plans against the same models without, over three real training steps.

    python -m benchmarks.equivalence [--only NAME ...] [-o docs/results/equivalence.md]

Outputs, loss, gradients, buffers, parameters, Adam's state, inputs and random numbers are compared
bit by bit; the peak is the sum of the CPU allocator's events in one more step.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch: one profile for each plan

import torch
from tabulate import tabulate

from benchmarks.cases import Case, import_torchvision
from benchmarks.equivalence_cases import CASES
from benchmarks.equivalence_measure import OPTIMIZER, STEPS, Outcome, examine
from benchmarks.stamp import write_stamp

KIB = 1024
THREADS = 1  # scratch memory of some kernels is per thread
TOLERANCE = 0.01
_ROWS = "## Models"

Row = Mapping[str, str]


def describe(outcome: Outcome) -> Row:
    """A model's row."""
    return {
        "model": outcome.name,
        "style": outcome.style,
        "nodes": str(outcome.nodes),
        "plain KiB": f"{outcome.plain_peak_bytes / KIB:.0f}",
        "plain error %": f"{100 * outcome.plain_error:.3f}",
        "plans": str(len(outcome.held)),
        "drawn": str(sum(held.drawn for held in outcome.held)),
        "equal": str(len(outcome.held) - len(outcome.differing)),
        "worst error %": f"{100 * outcome.worst_error:.3f}",
        "note": _explain(outcome).replace("|", "/").replace("\n", " "),
    }


def _explain(outcome: Outcome) -> str:
    parts = [f"no graph: {outcome.note}"] if outcome.note else []
    parts += [f"differs: {held.difference}"[:160] for held in outcome.differing[:1]]
    return "; ".join(parts)


def describe_failure(name: str, error: Exception) -> Row:
    """The row of a model that fails before there is a plan."""
    cause = f"{type(error).__name__}: {error}".replace("|", "/").replace("\n", " ")
    return {"model": name, "style": "-", "plans": "0", "equal": "0", "note": cause[:200]}


def run_case(case: Case) -> list[Row]:
    """The rows of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models' own
        try:
            return [describe(outcome) for outcome in examine(case)]
        except Exception as error:  # one model that fails is a row, not the end
            return [describe_failure(case.name, error)]


def summarize(rows: Sequence[Row]) -> str:
    """Sums all rows up, in a few lines."""
    ran = [row for row in rows if row["plans"] != "0"]
    plans, equal = (sum(int(row[key]) for row in ran) for key in ("plans", "equal"))
    errors = [float(row["worst error %"]) for row in ran]
    far = [row for row in ran if float(row["worst error %"]) > 100 * TOLERANCE]
    worst, median = max(errors, default=0.0), statistics.median(errors or [0.0])
    lines = [
        f"{len({row['model'] for row in rows})} models, {plans} plans in {len(ran)} rows.",
        f"Equal, bit for bit: {equal} of {plans}.",
        f"Peak within {TOLERANCE:.0%} of the plan's: {len(ran) - len(far)} of {len(ran)} rows;"
        f" worst {worst:.3f} %, median {median:.3f} %.",
    ]
    return "\n".join(f"- {line}" for line in lines)


COMMAND = "python -m benchmarks.equivalence -o docs/results/equivalence.md"
LEGEND = f"""\
Models with plans, held against the same models without: {STEPS} training steps with {OPTIMIZER}
each, from the same state, on one thread. The models are small, as what may break does so at any
size.

- style: of the plans: `graph` for the rewritten graph, `modules` for whole modules.
- plain error: how far the predicted peak of the model without a plan is from the measured one.
- plans: how many were applied; the loosest, the tightest and some between as the search finds
  them, and `drawn` ones, whose segments are drawn at random among all that are allowed.
- equal: with how many of them outputs, loss, gradients, buffers, parameters, the optimizer's
  state, inputs and random numbers are the plain model's after each step, bit by bit.
- worst error: the largest distance of a plan's peak from the measured one, over that.

The time that plans add is measured on larger steps: [overhead](overhead.md).
"""


def write_page(rows: Sequence[Row], stamp: str) -> str:
    """Writes the page, as Markdown."""
    parts = ["# Plans and equality", stamp, LEGEND, summarize(rows), _ROWS]
    parts.append(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def read_rows(page: str) -> list[Row]:
    """The rows of a page."""
    lines = [line for line in page.partition(_ROWS)[2].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def merge_rows(older: Iterable[Row], newer: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Rows in the order of the models, with older ones for those that were not run."""
    ran = {row["model"] for row in newer}
    rows = [*(row for row in older if row["model"] not in ran and row["model"] in names), *newer]
    return sorted(rows, key=lambda row: names.index(row["model"]))


def main() -> None:
    """Runs the comparison and prints it, or puts it into a file beside what that has already."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these alone")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    import_torchvision()
    gc.freeze()  # it runs before each measurement
    path: Path | None = options.output
    stamp = write_stamp(COMMAND)  # before the page changes the work tree
    rows: list[Row] = []
    for case in CASES:
        if options.only is not None and case.name not in options.only:
            continue
        rows += run_case(case)
        print(rows[-1], file=sys.stderr, flush=True)
        if path:  # after each model, since the whole takes a while
            older = read_rows(path.read_text()) if path.exists() else []
            path.write_text(write_page(merge_rows(older, rows, names), stamp))
    if path is None:
        print(write_page(rows, stamp))


if __name__ == "__main__":
    main()

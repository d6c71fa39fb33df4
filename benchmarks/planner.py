"""Holds fxmem's plans against what people do by hand, on real steps.

    python -m benchmarks.planner [--only NAME ...] [--compiled] [-o docs/results/planner.md]

Peaks are measured by the CPU allocator's events, FLOPs are counted by PyTorch, both on the step as
it runs; all of a model runs in one process, with the same parameters, inputs and random numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch: one profile for each row

import torch
from tabulate import tabulate

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.planner_cases import (
    CASES,
    ROTOR_BUDGETS,
    PlannerCase,
    Prepare,
    list_rotor,
)
from benchmarks.planner_measure import Forward, Measurement, Numbers, Trainer
from benchmarks.planner_page import ANSWERS, update_page
from benchmarks.stamp import write_stamp

MIB = 2**20
THREADS = 1  # scratch memory of some kernels is per thread; times of one are the steadiest


@dataclass(frozen=True)
class Row:
    """A way to run a model's step.

    Attributes:
        name: What was done.
        measured: How it ran; None where it failed.
        plan: The plan, where it is fxmem's.
        reason: Why it failed.
    """

    name: str
    measured: Measurement | None = None
    plan: fxmem.Plan | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """The distance of the predicted peak from the measured one, over that."""
        if self.plan is None or self.measured is None:
            return None
        return self.plan.peak_bytes / self.measured.peak_bytes - 1


@dataclass
class Result:
    """All rows of a model.

    Attributes:
        name: Of the model.
        parameter_bytes: Of its parameters, without which peaks are shown too.
        plain: The step as it is.
        by_hand: What people do.
        plans: What fxmem does, cheapest first.
        note: Why there are no plans.
    """

    name: str
    parameter_bytes: int
    plain: Measurement
    by_hand: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)
    note: str = ""

    def count_flops(self, row: Row) -> float:
        """A row's FLOPs over those of the plain step."""
        return row.measured.flops / self.plain.flops if row.measured else 0.0


@dataclass(frozen=True)
class Answer:
    """fxmem's answer to something done by hand, all as measured.

    Attributes:
        by_hand: That.
        leanest: The plan with the least peak among those with no more FLOPs.
        cheapest: The plan with the fewest FLOPs among those with no more peak.
    """

    by_hand: Row
    leanest: Row | None
    cheapest: Row | None

    @property
    def is_dominated(self) -> bool:
        """Tells whether a plan takes neither more memory nor more FLOPs."""
        return self.cheapest is not None and self.leanest is not None and self._beats(self.leanest)

    def _beats(self, row: Row) -> bool:
        assert row.measured and self.by_hand.measured
        return row.measured.peak_bytes <= self.by_hand.measured.peak_bytes


class Bench:
    """One model: its plain step, and whatever else is tried on it."""

    def __init__(self, case: PlannerCase, rounds: int) -> None:
        self.case, self.rounds = case.case, rounds
        self.args, self.kwargs = self.case.inputs()
        self.trainer = self._make_trainer()
        self.numbers: Numbers = self.trainer.compute_numbers(self.trainer.model)
        plain = self._measure(self.trainer, self.trainer.model)
        parameters = sum(p.nbytes for p in self.trainer.model.parameters())
        self.result = Result(self.case.name, parameters, plain)

    def _make_trainer(self) -> Trainer:
        return Trainer(self.case.model(), self.args, self.kwargs)

    def _measure(self, trainer: Trainer, forward: Forward) -> Measurement:
        return trainer.measure(forward, self.trainer.model, self.numbers, self.rounds)

    def try_by_hand(self, name: str, prepare: Prepare) -> Row:
        """Measures something done by hand to a model of its own."""
        try:
            trainer = self._make_trainer()
            forward = prepare(trainer.model)
            row = Row(name, self._measure(trainer, forward))
        except Exception as error:  # one way that fails is a row, not the end
            row = Row(name, reason=_explain(error))
        return row

    def try_plan(self, name: str, plan: fxmem.Plan) -> Row:
        """Measures a plan applied to the model."""
        try:
            planned: Forward = fxmem.apply(self.trainer.model, plan)
            row = Row(name, self._measure(self.trainer, planned), plan)
        except Exception as error:
            row = Row(name, plan=plan, reason=_explain(error))
        return row

    def choose_plans(self, points: int, time_limit_s: float | None) -> list[fxmem.Plan]:
        """Plans all along the front, and those that answer what was done by hand."""
        analysis = fxmem.analyze(self.trainer.model, self.args, self.kwargs, device="cpu")
        front = fxmem.pareto(analysis, by_flops=True, time_limit_s=time_limit_s)
        last = len(front) - 1
        steps = range(points if points > 1 else 0)
        chosen = [front[i] for i in {last, *(round(i * last / (points - 1)) for i in steps)}]
        for row in self.result.by_hand:
            if row.measured is not None:
                flops = max(0.0, self.result.count_flops(row) - 1) + 1e-9
                limits: list[dict[str, Any]] = [
                    {"max_overhead_flops": flops},
                    {"budget": row.measured.peak_bytes},
                ]
                for limit in limits:
                    with contextlib.suppress(fxmem.InfeasibleError):
                        chosen.append(fxmem.plan(analysis, **limit, time_limit_s=time_limit_s))
        different = {plan.segments: plan for plan in chosen}.values()
        return sorted(different, key=lambda plan: plan.overhead_flops)


def _explain(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def run_case(
    case: PlannerCase,
    points: int,
    *,
    rounds: int = 2,
    compiled: bool = False,
    time_limit_s: float | None = None,
) -> Result:
    """Measures everything about one model.

    Args:
        case: The model.
        points: How many plans of the front are applied, besides those that answer a baseline.
        rounds: How often each step is timed.
        compiled: Whether PyTorch's own budgets are tried too.
        time_limit_s: For each search.
    """
    bench = Bench(case, rounds)
    result = bench.result
    for name, prepare in _list_by_hand(case, bench, compiled):
        result.by_hand.append(bench.try_by_hand(name, prepare))
        _report(result, result.by_hand[-1])
    try:
        plans = bench.choose_plans(points, time_limit_s)
    except Exception as error:
        result.note = _explain(error)
        return result
    for number, plan in enumerate(plans, 1):
        result.plans.append(bench.try_plan(f"fxmem {number}", plan))
        _report(result, result.plans[-1])
    return result


def _list_by_hand(case: PlannerCase, bench: Bench, compiled: bool) -> Iterator[tuple[str, Prepare]]:
    yield from case.baselines.items()
    if compiled:
        from benchmarks.planner_compiled import list_compiled  # inductor takes its time

        yield from list_compiled()
    if case.chained:
        yield from list_rotor(case.case.model().train(), *bench.args)


def find_answers(result: Result) -> list[Answer]:
    """For each thing done by hand, the best plans that were measured."""
    plans = [row for row in result.plans if row.measured is not None]
    answers = []
    for row in result.by_hand:
        if row.measured is None:
            continue
        peak, flops = row.measured.peak_bytes, row.measured.flops
        lean = [r for r in plans if r.measured and r.measured.flops <= flops]
        fits = [r for r in plans if r.measured and r.measured.peak_bytes <= peak]
        leanest = min(lean, key=lambda r: r.measured.peak_bytes if r.measured else 0, default=None)
        cheapest = min(fits, key=lambda r: r.measured.flops if r.measured else 0, default=None)
        answers.append(Answer(row, leanest, cheapest))
    return answers


def _report(result: Result, row: Row) -> None:
    measured = row.measured
    text = row.reason
    if measured is not None:
        error = "" if row.error is None else f" predicted {100 * row.error:+.3f} %"
        text = (
            f"{measured.peak_bytes / MIB:9.2f} MiB  FLOPs {result.count_flops(row):.4f}"
            f"  time {_show_time(measured)}  {measured.equal}{error}"
        )
    print(f"{result.name:14s} {row.name:32s} {text}", file=sys.stderr, flush=True)


# -- tables -------------------------------------------------------------------------------------


def show_percent(value: float | None) -> str:
    """In percent; zero only where it is exactly zero."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{100 * value:+.3f}"


def _show_time(measured: Measurement) -> str:
    return "-" if measured.time_ratio is None else f"{measured.time_ratio:.2f}"


def tabulate_steps(result: Result) -> str:
    """Every way to run a model's step, as a Markdown table."""
    rows = [Row("plain", result.plain), *result.by_hand, *result.plans]
    cells = []
    for row in rows:
        measured = row.measured
        cell: dict[str, str] = {"step": row.name}
        cell["predicted MiB"] = "" if row.plan is None else f"{row.plan.peak_bytes / MIB:.2f}"
        if measured is not None:
            beyond = measured.peak_bytes - result.parameter_bytes
            cell |= {
                "measured MiB": f"{measured.peak_bytes / MIB:.2f}",
                "difference %": show_percent(row.error),
                "beyond parameters MiB": f"{beyond / MIB:.2f}",
                "peak ratio": f"{measured.peak_bytes / result.plain.peak_bytes:.3f}",
                "FLOPs ratio": f"{result.count_flops(row):.4f}",
                "time ratio": _show_time(measured),
                "equal": measured.equal,
            }
        cell["failed"] = row.reason.replace("|", "/")
        cells.append(cell)
    if not any(cell["failed"] for cell in cells):
        for cell in cells:
            del cell["failed"]
    return _tabulate(cells)


def tabulate_answers(results: Sequence[Result]) -> str:
    """Tabulates the ways by hand beside the plans with no more FLOPs or no more peak."""
    cells = []
    for result in results:
        for answer in find_answers(result):
            row, leanest, cheapest = answer.by_hand, answer.leanest, answer.cheapest
            assert row.measured is not None
            cell = {
                "model": result.name,
                "by hand": row.name,
                "MiB": f"{row.measured.peak_bytes / MIB:.2f}",
                "FLOPs": f"{result.count_flops(row):.4f}",
            }
            if leanest is not None and leanest.measured is not None:
                ours = leanest.measured.peak_bytes
                cell |= {
                    "fxmem MiB": f"{ours / MIB:.2f}",
                    "at FLOPs": f"{result.count_flops(leanest):.4f}",
                    "peak ratio": f"{ours / row.measured.peak_bytes:.3f}",
                }
            least = "-" if cheapest is None else f"{result.count_flops(cheapest):.4f}"
            cell["FLOPs at its peak"] = least
            cell["not worse"] = "yes" if answer.is_dominated else "NO"
            cells.append(cell)
    return _tabulate(cells)


def tabulate_models(results: Sequence[Result]) -> str:
    """Tabulates the plans of each model, as Markdown."""
    cells = []
    for result in results:
        errors = [abs(row.error) for row in result.plans if row.error is not None]
        applied = [row.measured for row in result.plans if row.measured is not None]
        answers = find_answers(result)
        cells.append(
            {
                "model": result.name,
                "plain MiB": f"{result.plain.peak_bytes / MIB:.2f}",
                "plans applied": f"{len(applied)}/{len(result.plans)}",
                "worst difference %": f"{100 * max(errors, default=0.0):.3f}" if errors else "-",
                "bit-equal": f"{sum(m.equal == 'yes' for m in applied)}/{len(applied)}",
                "not worse than by hand": f"{sum(a.is_dominated for a in answers)}/{len(answers)}",
                "note": result.note.replace("|", "/"),
            }
        )
    return _tabulate(cells)


def _tabulate(cells: Sequence[dict[str, Any]]) -> str:
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


COMMAND = "python -m benchmarks.planner --rounds 0 -o docs/results/planner.md"
LEGEND = """\
Plans of fxmem and what people do by hand, each applied to a model and run on one thread.

- predicted: the peak that the plan promises, and how far it is from the measured one.
- measured: the peak of a step's allocations, with parameters, buffers and inputs.
- FLOPs: those that PyTorch counts in the step, over those of the plain step.
- time: of a step over the plain one, in turns; the machine was shared, so it is a rough figure.
- equal: whether loss, gradients and statistics of normalisations are those of the plain step, bit
  by bit; `not statistics`: all but the statistics, which were updated twice.
- rotor: the best schedules over the blocks (Beaumont, Herrmann et al.), which keep all of a block
  or its input, for {budgets} budgets, run as nested checkpoints.
- budget, compiled: `torch.compile` with PyTorch's own `activation_memory_budget`, whose graphs run
  operator by operator; what is kept and what is computed again is decided as for inductor.
- fxmem MiB, at FLOPs: the leanest plan measured with no more FLOPs than by hand; FLOPs at its
  peak: of the cheapest plan with no more peak; not worse: a plan has no more of either.
"""


def write_page(results: Sequence[Result], stamp: str) -> str:
    """Writes the page, as Markdown."""
    parts = [
        "# Plans against checkpoints by hand",
        stamp,
        LEGEND.format(budgets=ROTOR_BUDGETS),
        tabulate_models(results),
        f"## {ANSWERS}",
        tabulate_answers(results),
    ]
    for result in results:
        parts += [f"## {result.name}", tabulate_steps(result)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Runs the comparison and prints it, or puts it into a file beside what that has already."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these alone")
    parser.add_argument("--compiled", action="store_true", help="PyTorch's own budgets too")
    parser.add_argument("--points", type=int, default=20, help="plans applied of the two nets")
    parser.add_argument("--rounds", type=int, default=2, help="how often steps are timed; 0: not")
    parser.add_argument(
        "--time-limit",
        type=float,
        help="seconds after which each search is cut short",
    )
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    import_torchvision()
    stamp = write_stamp(COMMAND)  # before the page changes the work tree
    results: list[Result] = []
    for case in CASES:
        if options.only is None or case.case.name in options.only:
            points = options.points if case.chained else 0
            results.append(
                run_case(
                    case,
                    points,
                    rounds=options.rounds,
                    compiled=options.compiled,
                    time_limit_s=options.time_limit,
                )
            )
            if options.output:  # after each model, since the whole takes a while
                update_page(options.output, write_page(results, stamp), names)
    print(tabulate_models(results) if options.output else write_page(results, stamp))


if __name__ == "__main__":
    main()

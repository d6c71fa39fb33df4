"""Holds the time that plans are estimated to add against the time that they add on a CPU.

    python -m benchmarks.overhead [--only NAME ...] [--rounds 3] [-o docs/results/overhead.md]

The steps are those of `benchmarks.planner`, long enough that arithmetic is what takes the time.
What a segment costs besides, in Python, is measured on one that computes next to nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.planner_cases import CASES, PlannerCase
from benchmarks.planner_measure import Trainer
from fxmem.planning.plan import GRAPH, MODULES

THREADS = 1  # the steadiest
POINTS = 3
_LAYERS = 100


@dataclass(frozen=True)
class Row:
    """One plan applied to a model.

    Attributes:
        name: Of the model.
        style: Of the plan.
        plan: The plan.
        time_ratio: A step's time over the plain one's.
    """

    name: str
    style: str
    plan: fxmem.Plan
    time_ratio: float

    @property
    def error(self) -> float:
        """By how much of the plain step's time the estimate is off."""
        return self.plan.overhead - (self.time_ratio - 1)


def time_plans(case: PlannerCase, rounds: int) -> list[Row]:
    """Times plans of both styles, from the one that adds least to the one that adds most."""
    args, kwargs = case.case.inputs()
    model = case.case.model()
    analysis = fxmem.analyze(model, args, kwargs, device="cpu")
    trainer = Trainer(model, args, kwargs)
    rows = []
    for style in (GRAPH, MODULES) if analysis.frontend == "fx" else (MODULES,):
        front = fxmem.pareto(analysis, style=style, points=POINTS + 1)
        for plan in front[1:]:
            planned = fxmem.apply(model, plan)
            trainer.run(planned)
            ratio = trainer.compare_time(planned, model, rounds)
            assert ratio is not None
            rows.append(Row(case.case.name, style, plan, ratio))
            print(describe(rows[-1]), file=sys.stderr, flush=True)
    return rows


def time_calls(rounds: int) -> list[tuple[str, str, float]]:
    """Seconds that a segment adds besides what it computes again: style, kind and seconds."""
    found = []
    for kind, layer in (("a linear layer", nn.Linear), ("one with dropout", _Dropping)):
        model = nn.Sequential(*(nn.Sequential(layer(4, 4), nn.Tanh()) for _ in range(_LAYERS)))
        x = torch.randn(1, 4, requires_grad=True)
        analysis = fxmem.analyze(model, x, device="cpu")
        trainer = Trainer(model, (x,), {})
        for style in (GRAPH, MODULES):
            plan = max(fxmem.pareto(analysis, style=style), key=lambda p: len(p.segments))
            planned = fxmem.apply(model, plan)
            trainer.run(planned)
            times = [(trainer.time_step(planned), trainer.time_step(model)) for _ in range(rounds)]
            ours, theirs = (min(side) for side in zip(*times, strict=True))
            found.append((style, kind, (ours - theirs) / max(1, len(plan.segments))))
    return found


class _Dropping(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.Dropout(0.1))


def describe(row: Row) -> dict[str, str]:
    """A plan's row of the table."""
    plan = row.plan
    return {
        "model": row.name,
        "style": row.style,
        "segments": str(len(plan.segments)),
        "peak ratio": f"{plan.peak_bytes / plan.baseline_peak_bytes:.3f}",
        "FLOPs %": f"+{100 * plan.overhead_flops:.1f}",
        "estimated time %": f"+{100 * plan.overhead:.1f}",
        "measured time %": f"{100 * (row.time_ratio - 1):+.1f}",
    }


def write_page(rows: Sequence[Row], calls: Sequence[tuple[str, str, float]]) -> str:
    """The page, as Markdown."""
    errors = [100 * abs(row.error) for row in rows]
    summary = (
        f"Estimate and measurement are {statistics.median(errors):.1f} % of the plain step's time"
        f" apart in the median of {len(rows)} plans, at most {max(errors):.1f} %."
    )
    costs = [
        {"style": style, "segment": kind, "added µs": f"{1e6 * seconds:.0f}"}
        for style, kind, seconds in calls
    ]
    return "\n\n".join(
        [
            "# Time that plans add",
            _LEGEND.strip(),
            summary,
            tabulate([describe(r) for r in rows], "keys", "github", disable_numparse=True),
            "## Beside arithmetic",
            "What each segment adds in Python and in autograd, forward and backward, whatever it"
            " computes:",
            tabulate(costs, "keys", "github", disable_numparse=True),
            "",
        ]
    )


_LEGEND = f"""
Plans of real sizes, applied and timed in turns with the same step without a plan, on one thread of
a CPU with PyTorch {torch.__version__}: `python -m benchmarks.overhead`. Times are the least of
their rounds.

- estimated time: what a plan says (`Plan.overhead`), by the roofline of a desktop processor
  ([why](../decisions/0012-plans-are-scored-on-the-step.md)); of a GPU it is another.
- measured time: of a step with the plan, over that without.
- FLOPs: what the plan computes again, over those of the step.
"""


def main() -> None:
    """Times plans, and prints the page or writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these alone")
    parser.add_argument("--rounds", type=int, default=3, help="how often each step is timed")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    import_torchvision()
    gc.freeze()
    cases = [case for case in CASES if options.only is None or case.case.name in options.only]
    rows = [row for case in cases for row in time_plans(case, options.rounds)]
    page = write_page(rows, time_calls(4 * options.rounds))
    if options.output is None:
        print(page)
    else:
        options.output.write_text(page)


if __name__ == "__main__":
    main()

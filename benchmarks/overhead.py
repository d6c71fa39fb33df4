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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.planner_cases import CASES, PlannerCase
from benchmarks.planner_measure import Trainer
from benchmarks.stamp import write_stamp
from fxmem.planning.plan import GRAPH, MODULES, Segment

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


def time_calls(rounds: int) -> list[dict[str, str]]:
    """Times what a segment adds to a step: ours in both styles, and PyTorch's by hand.

    The layers compute next to nothing, and each is one segment. A segment's own overhead is what it
    adds beyond running its layer a second time. Times are the process's, the least of the rounds.
    """
    rows = []
    for kind, layer in (("a linear layer", nn.Linear), ("one with dropout", _Dropping)):
        model = nn.Sequential(*(nn.Sequential(layer(4, 4), nn.Tanh()) for _ in range(_LAYERS)))
        x = torch.randn(1, 4, requires_grad=True)
        runs = {"plain": model, "by hand": _ByHand(model)}
        for style in (GRAPH, MODULES):
            runs[style] = fxmem.apply(model, _plan_layers(model, x, style))
        least = dict.fromkeys((*runs, "again"), float("inf"))
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.process_time()
                run(x).sum().backward()
                least[name] = min(least[name], time.process_time() - start)
            start = time.process_time()
            model(x)
            least["again"] = min(least["again"], time.process_time() - start)
        unavoidable = least["plain"] + least["again"]
        by_hand = least["by hand"] - unavoidable
        for name in ("by hand", GRAPH, MODULES):
            added = least[name] - least["plain"]
            rows.append(
                {
                    "segment": kind,
                    "style": "torch.utils.checkpoint by hand" if name == "by hand" else name,
                    "added µs": f"{1e6 * added / _LAYERS:.0f}",
                    "its own overhead µs": f"{1e6 * (least[name] - unavoidable) / _LAYERS:.0f}",
                    "of by hand": f"{(least[name] - unavoidable) / by_hand:.2f}",
                }
            )
    return rows


def time_operator(rounds: int) -> float:
    """Times an operator that computes next to nothing: seconds of the host, in a plain step."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(_LAYERS)))
    x = torch.randn(1, 4, requires_grad=True)
    operators = len(fxmem.analyze(model, x, device="cpu").graph.operations)
    least = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        model(x).sum().backward()
        least = min(least, time.process_time() - start)
    return least / operators


def _plan_layers(model: nn.Module, x: torch.Tensor, style: str) -> fxmem.Plan:
    """Puts each layer under a segment of its own."""
    analysis = fxmem.analyze(model, x, device="cpu")
    plan = fxmem.pareto(analysis, style=style, time_limit_s=1)[0]
    names: dict[str, list[str]] = {}
    for node in analysis.nodes:
        if node.op == "call_module":
            names.setdefault(node.fqn.split(".")[0], []).append(node.name)
    # As plans describe them: a dropout draws, and the activation at the end saves its result.
    options = {"random": any("Dropout" in n.target for n in analysis.nodes), "runs_whole": True}
    segments = tuple(Segment(n[0], n[-1], len(n), fqn=q, **options) for q, n in names.items())
    assert len(segments) == _LAYERS
    return replace(plan, segments=segments, style=style)


class _ByHand(nn.Module):
    """Layers under checkpoints of PyTorch's, as they are written by hand."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


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


def write_page(rows: Sequence[Row], calls: Sequence[dict[str, str]], operator_s: float) -> str:
    """Writes the page, as Markdown."""
    errors = [100 * abs(row.error) for row in rows]
    summary = (
        f"Estimate and measurement are {statistics.median(errors):.1f} % of the plain step's time"
        f" apart in the median of {len(rows)} plans, at most {max(errors):.1f} %."
    )
    return "\n\n".join(
        [
            "# Time that plans add",
            write_stamp(COMMAND),
            _LEGEND.strip(),
            summary,
            tabulate([describe(r) for r in rows], "keys", "github", disable_numparse=True),
            "## Beside arithmetic",
            "Time that each segment adds in Python and in autograd, forward and backward,"
            " whatever its arithmetic, beside torch.utils.checkpoint(use_reentrant=False) by hand"
            " on the same layers:",
            tabulate(calls, "keys", "github", disable_numparse=True),
            write_operator(operator_s),
            "",
        ]
    )


COMMAND = "python -m benchmarks.overhead -o docs/results/overhead.md"


def write_operator(operator_s: float) -> str:
    """Writes how long the host takes for an operator."""
    return f"The host takes {1e6 * operator_s:.1f} µs for an operator of the plain step."


_LEGEND = """
Plans of real sizes, applied and timed in turns with the same step without a plan, on one thread.
Times are the least of their rounds.

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
    parser.add_argument("--calls", action="store_true", help="only what segments add by themselves")
    parser.add_argument("--rounds", type=int, default=3, help="how often each step is timed")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.calls:
        print(tabulate(time_calls(20 * options.rounds), "keys", "github", disable_numparse=True))
        print(write_operator(time_operator(20 * options.rounds)))
        return
    import_torchvision()
    gc.freeze()
    cases = [case for case in CASES if options.only is None or case.case.name in options.only]
    rows = [row for case in cases for row in time_plans(case, options.rounds)]
    rounds = 20 * options.rounds
    page = write_page(rows, time_calls(rounds), time_operator(rounds))
    if options.output is None:
        print(page)
    else:
        options.output.write_text(page)


if __name__ == "__main__":
    main()

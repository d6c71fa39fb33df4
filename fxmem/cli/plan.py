"""``fxmem plan``: what to compute again for a lower peak, and what that costs."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxmem.cli.output import check_output, choose_width, write_output
from fxmem.cli.progress import show_progress
from fxmem.cli.step import (
    TARGET_HELP,
    StepChoice,
    add_step_options,
    advise_step,
    analyze_step,
    parse_budget,
    parse_step,
)
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan

_MOST_OVERHEAD = 2.0
"""A larger share is a number of percent whose sign was forgotten."""
_ALL = 10**6
"""More trade-offs than any search finds."""

_DESCRIPTION = f"""\
Finds what forward need not keep because backward can compute it again, so that the peak
of a training step falls, for the least time or FLOPs added. Nothing is changed: take the
plan in Python with fxmem.apply, or write the suggested lines into your own code.

Without a limit, the table of all trade-offs. In inference, nothing is recomputed: the
plan is what the code could do in place or free early.

{TARGET_HELP}"""
_EPILOG = """\
examples:
  fxmem plan resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem plan 'gpt.py:GPT(layers=24)' --input 4x512:int64 --budget 4GiB -o plan.json
  fxmem plan gpt.py:GPT --input 64x512:int64 --optimizer adamw --gpu rtx4090 --fit
  fxmem plan unet.py:UNet --input 4x3x256x256 --max-overhead 10%
  fxmem plan unet.py:UNet --input 4x3x256x256 --advice

exit codes: 0 fine, 1 no plan keeps the limit, 2 bad usage or a model that cannot be planned
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the parser of ``fxmem``.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="what to compute again for a lower peak, and what that costs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan, parser=parser)
    add_step_options(parser, analyzes=False)
    _add_limit_options(parser)
    _add_output_options(parser)


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the limit: at most one")
    limits = group.add_mutually_exclusive_group()
    limits.add_argument(
        "--budget", metavar="SIZE", help="the cheapest plan with a peak within it, e.g. 4GiB"
    )
    limits.add_argument(
        "--fit", action="store_true", help="the cheapest plan whose step fits the --gpu"
    )
    limits.add_argument(
        "--max-overhead",
        metavar="SHARE",
        help="the leanest plan that adds no more to the step's time, e.g. 0.1 or 10%%",
    )
    limits.add_argument("--max-overhead-flops", metavar="SHARE", help="likewise for its FLOPs")
    group.add_argument(
        "--style",
        choices=["graph", "modules"],
        help="what is recomputed: graph for any consecutive operations, modules for whole "
        "modules, whose code stays as it is (default: graph where the model can be traced)",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="cut the search short after so many seconds (default: it ends by itself)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the result")
    kinds = output.add_mutually_exclusive_group()
    output.add_argument(
        "--points",
        type=int,
        default=20,
        metavar="N",
        help="how many trade-offs to list at most (default: %(default)s)",
    )
    kinds.add_argument("--json", action="store_true", help="the plan, or all of them, as JSON")
    kinds.add_argument(
        "--advice",
        action="store_true",
        help="what else lowers the peak (autocast, micro-batches, the optimizer, the host's "
        "memory ...), after the plan; without a limit, in place of the table",
    )
    output.add_argument(
        "-o", "--output", metavar="FILE", help="write the plan to FILE, as JSON, besides"
    )
    output.add_argument("--debug", action="store_true", help="show tracebacks")


def run_plan(arguments: argparse.Namespace) -> int:
    """Plans a target's step and writes the plan, or all trade-offs.

    Args:
        arguments: What the parser of this command returned.

    Returns:
        The exit code: 0.

    Raises:
        InfeasibleError: No plan keeps the limit.
        FxmemError: Bad usage, or a model that cannot be loaded, traced or planned.
    """
    # Mistakes in the arguments are reported before torch is imported and the model is run.
    step = parse_step(arguments)
    limit = _parse_limit(arguments)
    _check_result(arguments, limit)
    if arguments.output is not None:
        check_output(arguments.output)
    check_output(None)
    with show_progress(f"planning {arguments.target}"):
        plan, text = _make_result(arguments, step, limit)
    if plan is not None and arguments.output is not None:
        write_output(f"{plan.to_json()}\n", arguments.output)
    write_output(text, None)
    return 0


def _parse_limit(arguments: argparse.Namespace) -> dict[str, Any]:
    """The limit as :func:`fxmem.plan` takes it, and how long to search."""
    limit: dict[str, Any] = {}
    if arguments.budget is not None:
        limit["budget"] = parse_budget(arguments.budget)
    for name in ("max_overhead", "max_overhead_flops"):
        text = getattr(arguments, name)
        if text is not None:
            limit[name] = _parse_share(text, f"--{name.replace('_', '-')}")
    trains_only = arguments.fit or arguments.style or limit.keys() - {"budget"}
    if arguments.mode != "train" and trains_only:
        raise UsageError(
            "inference computes nothing again", hint="--budget, or no limit, for changes of code"
        )
    if arguments.fit and arguments.gpu is None:
        raise UsageError("--fit needs a GPU", hint="name it: --gpu rtx4090")
    if arguments.points < 2:
        raise UsageError(f"--points must be 2 or more, got {arguments.points}")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise UsageError(f"--time-limit must be more than 0 seconds, got {arguments.time_limit:g}")
    return limit


def _parse_share(text: str, option: str) -> float:
    number, percent, _ = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a share", hint="0.1 or 10%") from None
    if not share >= 0:
        raise UsageError(f"{option} must be 0 or more, got {text.strip()}")
    if share > _MOST_OVERHEAD and not percent:
        raise UsageError(
            f"{option} of {text.strip()} is {100 * share:g} %",
            hint=f"{text.strip()}% if percent are meant, else {100 * share:g}%",
        )
    return share


def _check_result(arguments: argparse.Namespace, limit: dict[str, Any]) -> None:
    if arguments.output is not None and not _chooses_plan(arguments, limit):
        raise UsageError(
            "-o writes one plan, and none is chosen",
            hint="give a limit, such as --budget 4GiB or --max-overhead 0.1",
        )


def _chooses_plan(arguments: argparse.Namespace, limit: dict[str, Any]) -> bool:
    """Tells whether the result is one plan, and no table of all."""
    return bool(limit or arguments.fit or arguments.mode != "train")


def _make_result(
    arguments: argparse.Namespace, step: StepChoice, limit: dict[str, Any]
) -> tuple[Plan | None, str]:
    """The plan that was asked for, if one was, and what to print."""
    analysis = analyze_step(step)
    if arguments.advice and not _chooses_plan(arguments, limit):
        return None, _render_advice(analysis, step)
    from fxmem.planning.outcome import choose_fitting
    from fxmem.planning.planner import pareto, plan

    given = {"time_limit_s": arguments.time_limit, "style": arguments.style}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if limit or arguments.mode != "train":
        chosen = plan(analysis, **limit, **options)
    else:
        points = _ALL if arguments.fit else arguments.points
        plans = pareto(analysis, points=points, **options)
        if not arguments.fit:
            return None, _render_front(plans, analysis, arguments)
        chosen = choose_fitting(analysis, plans)
    text = _render_plan(chosen, analysis, arguments)
    if arguments.advice:
        text += f"\n{_render_advice(analysis, step, alone=False)}"
    return chosen, text


def _render_advice(analysis: Analysis, step: StepChoice, *, alone: bool = True) -> str:
    from fxmem.report.plan_text import render_advice

    return render_advice(
        advise_step(step, analysis),
        analysis.peak_bytes,
        analysis.setup if alone else None,
        width=choose_width(None),
    )


def _render_front(
    plans: tuple[Plan, ...], analysis: Analysis, arguments: argparse.Namespace
) -> str:
    if arguments.json:
        return json.dumps([json.loads(plan.to_json()) for plan in plans], indent=2) + "\n"
    from fxmem.report.plan_text import render_front

    return render_front(
        plans,
        analysis.setup,
        width=choose_width(None),
    )


def _render_plan(plan: Plan, analysis: Analysis, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return f"{plan.to_json()}\n"
    from fxmem.planning.outcome import find_planned_peak
    from fxmem.report.plan_text import render_plan
    from fxmem.report.suggestions import render_suggestions, suggest_code

    sources = {}
    for path in {node.source.file for node in analysis.nodes if node.source is not None}:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # such as code that was typed
            sources[path] = Path(path).read_text(encoding="utf-8")
    text = render_plan(
        plan,
        analysis.setup,
        peak=find_planned_peak(analysis, plan),
        width=choose_width(None),
    )
    suggestions = render_suggestions(suggest_code(plan, analysis.nodes, sources))
    return f"{text}\n{suggestions}" if suggestions else text

"""``fxmem plan``: what to recompute for a lower peak, and at what cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import fxmem
from fxmem.cli.shared.output import (
    add_output_options,
    check_output,
    choose_format,
    parse_budget,
    show_progress,
    write_result,
)
from fxmem.cli.shared.step import (
    add_count,
    add_step_options,
    add_strategy_option,
    analyze_step,
    parse_share,
    parse_step,
    run_user_code,
)
from fxmem.errors import UsageError
from fxmem.report.result import Report

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan
    from fxmem.report.blocks import Block
    from fxmem.report.result import Result

HELP = "what to recompute for a lower peak, and at what cost"
DESCRIPTION = """\
Finds which activations backward can recompute instead of keeping them, so that the peak of
a training step falls for the least added time or FLOPs. The model is not changed: apply the
plan in Python with fxmem.apply, or write the suggested lines into your own code.

Without a limit, prints the table of all trade-offs. In inference nothing is recomputed: the
plan is what the code could compute in place or free early."""
EPILOG = """\
examples:
  fxmem plan resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem plan 'gpt.py:GPT(layers=24)' --input 4x512:int64 --budget 4GiB -o plan.json
  fxmem plan gpt.py:GPT --input 64x512:int64 --optimizer adamw --gpu rtx4090 --fit
  fxmem plan unet.py:UNet --input 4x3x256x256 --max-overhead 10%
  fxmem plan unet.py:UNet --input 4x3x256x256 --advice
  fxmem plan gpt.py:GPT --input 8x512:int64 --compile

exit codes: 0 fine, 1 no plan keeps the limit, 2 bad usage or a model that cannot be planned
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False)
    group = parser.add_argument_group("the limit: at most one")
    limits = group.add_mutually_exclusive_group()
    limits.add_argument(
        "--budget",
        type=parse_budget,
        metavar="SIZE",
        help="the cheapest plan whose peak is within it, e.g. 4GiB",
    )
    limits.add_argument(
        "--fit", action="store_true", help="the cheapest plan whose step fits the --gpu"
    )
    limits.add_argument(
        "--max-overhead",
        metavar="SHARE",
        help="the lowest peak for at most this share of added time, e.g. 0.1 or 10%%",
    )
    limits.add_argument("--max-overhead-flops", metavar="SHARE", help="the same for added FLOPs")
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
        help="stop the search after so many seconds (default: it ends by itself)",
    )
    add_strategy_option(group)
    limits.add_argument(
        "--compile",
        action="store_true",
        help="compile the model, and list peak and time by activation_memory_budget, which "
        "PyTorch's compiler plans with",
    )

    output = add_output_options(parser)
    add_count(output, "--points", "how many trade-offs to list at most", 20)
    output.add_argument(
        "--advice",
        action="store_true",
        help="what else lowers the peak (autocast, micro-batches, the optimizer, the host's "
        "memory ...), after the plan; without a limit, in place of the table",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Plans a target's step and writes the plan, or all trade-offs."""
    step = parse_step(arguments)
    limit = _parse_limit(arguments)
    is_one = bool(limit or arguments.fit or arguments.mode != "train")
    if arguments.json and arguments.advice:
        raise UsageError("--advice is text", hint="leave --json out")
    kind = choose_format(arguments)
    path = arguments.output
    if path is not None and kind in ("json", "txt") and not path.lower().endswith(".txt"):
        if not is_one and not arguments.compile:
            raise UsageError(
                "-o writes one plan, and none is chosen",
                hint="give a limit, such as --budget 4GiB or --max-overhead 0.1",
            )
        kind = "plan" if is_one else "json"
    check_output(None)
    chosen, blocks = None, list["Block"]()
    values: Result | None = None
    with show_progress(f"planning {arguments.target}"):
        analysis = analyze_step(step)
        with run_user_code(step.target):
            if arguments.compile:
                values = fxmem.memory_budgets(analysis)
                blocks = values.list_blocks()
            elif analysis.setup.mesh is not None and (is_one or not arguments.advice):
                chosen, values, blocks = _plan_rank(arguments, analysis, limit)
            elif is_one:
                chosen = values = _choose_plan(arguments, analysis, limit)
                blocks = chosen.list_blocks()
            elif not arguments.advice:
                values, blocks = _list_front(arguments, analysis)
            if arguments.advice:
                from fxmem.advice.advising import find_advice
                from fxmem.planning.plan_blocks import list_advice_blocks

                given = (step.target, step.args, step.kwargs, step.options)
                advice, setup = find_advice(analysis, *given), None if is_one else analysis.setup
                blocks += list_advice_blocks(advice, analysis.peak_bytes, setup)
    report = Report(blocks, values)
    if kind == "plan" and chosen is not None:
        write_result(chosen, "json", path)
    elif path is not None:
        write_result(report, kind, path)
    write_result(report, "json" if arguments.json else "txt", None)
    return 0


def _parse_limit(arguments: argparse.Namespace) -> dict[str, Any]:
    limit: dict[str, Any] = {}
    if arguments.budget is not None:
        limit["budget"] = arguments.budget
    for name in ("max_overhead", "max_overhead_flops"):
        text = getattr(arguments, name)
        if text is not None:
            limit[name] = parse_share(text, f"--{name.replace('_', '-')}")
    trains_only = arguments.fit or arguments.style or limit.keys() - {"budget"}
    if arguments.mode != "train" and trains_only:
        raise UsageError("inference recomputes nothing", hint="give --budget, or no limit")
    if arguments.fit and arguments.gpu is None:
        raise UsageError("--fit needs a GPU", hint="name it: --gpu rtx4090")
    if arguments.points < 2:
        raise UsageError(f"--points must be 2 or more, got {arguments.points}")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise UsageError(f"--time-limit must be more than 0 seconds, got {arguments.time_limit:g}")
    return limit


def _list_search_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from fxmem.training.options import load_choice

    return {
        "time_limit_s": arguments.time_limit,
        "style": arguments.style,
        "strategy": load_choice(arguments.strategy),
    }


def _choose_plan(arguments: argparse.Namespace, analysis: Analysis, limit: dict[str, Any]) -> Plan:
    options = _list_search_options(arguments)
    if not arguments.fit:
        return fxmem.plan(analysis, **limit, **options)
    from fxmem.planning.planner import plan_fitting

    return plan_fitting(analysis, **options)


def _plan_rank(
    arguments: argparse.Namespace, analysis: Analysis, limit: dict[str, Any]
) -> tuple[Plan | None, Result, list[Block]]:
    """Plans the step of a rank; returns the plan, where one is asked for, and the report."""
    from fxmem.applying.plan_search import choose_plan, list_ways, record_front, seek_rank_plans
    from fxmem.planning.plan_blocks import list_way_blocks
    from fxmem.planning.planner import resolve_limit

    names = ("budget", "max_overhead", "max_overhead_flops")
    resolved = resolve_limit(*map(limit.get, names)) if limit else None
    points = {} if resolved or arguments.fit else {"points": min(arguments.points, 8)}
    plans = seek_rank_plans(analysis, **points, **_list_search_options(arguments))
    if points:
        front = record_front(plans)
        return None, front, list_way_blocks([*list_ways(plans)], analysis.setup)
    chosen = choose_plan(plans, resolved)
    budget_bytes = resolved.budget_bytes if resolved else None
    ways = list_way_blocks([*list_ways(plans)], None, chosen=chosen, budget_bytes=budget_bytes)
    return chosen, chosen, [*chosen.list_blocks(), *ways]


def _list_front(arguments: argparse.Namespace, analysis: Analysis) -> tuple[Result, list[Block]]:
    from fxmem.integrations.checkpoints import price_checkpoints
    from fxmem.planning.plan_blocks import write_price

    plans = fxmem.pareto(analysis, points=arguments.points, **_list_search_options(arguments))
    price = price_checkpoints(analysis)
    more = [] if price is None else [write_price(price, analysis.peak_bytes)]
    return plans, [*plans.list_blocks(), *more]

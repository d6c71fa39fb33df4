"""``fxmem render``: a picture of one step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

import fxmem
from fxmem.cli.shared.output import check_output, read_plan, read_text, show_progress, write_output
from fxmem.cli.shared.step import (
    add_count,
    add_step_options,
    add_strategy_option,
    analyze_step,
    list_given,
    parse_step,
)
from fxmem.errors import UsageError
from fxmem.report.formats import (
    FORMATS,
    REPORT,
    SNAPSHOT,
    TIMELINE,
    TRADEOFF,
    RenderOptions,
    find_format,
    find_view,
    list_suffixes,
    render_as,
)

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

HELP = "a picture of one step, its peak marked"
DESCRIPTION = """\
Draws the operations of a step inside their modules, with the memory that each allocates,
saves for backward and holds at the peak. TARGET may also be a report that was saved with
fxmem analyze --json -o FILE.json.

Blocks that repeat are drawn once, and modules are opened as far as a reader can take in,
those around the peak to the last operation."""
EPILOG = """\
examples:
  fxmem render resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam -o peak.svg
  fxmem render gpt.py:GPT --input 4x512:int64 --plan plan.json -o plan.png
  fxmem render report.json --depth 2 -o modules.pdf
  fxmem render report.json --view timeline -o timeline.svg
  fxmem render gpt.py:GPT --input 4x512:int64 -o step.pickle
  fxmem render gpt.py:GPT --input 4x512:int64 -o report.html
  fxmem render unet.py:UNet --input 1x3x256x256 --mode infer > unet.dot

exit codes: 0 fine, 2 bad usage, a model that cannot be loaded or traced, or no Graphviz
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False)
    picture = parser.add_argument_group("the picture")
    picture.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"write to FILE instead of stdout; its suffix chooses the format: {list_suffixes()}",
    )
    picture.add_argument(
        "--format", metavar="NAME", help=f"{', '.join(FORMATS)} (default: by FILE, else dot)"
    )
    picture.add_argument(
        "--view",
        metavar="NAME",
        help="graph, timeline or tradeoff (default: graph, or the only view of the format)",
    )
    add_count(
        picture,
        "--depth",
        "open N levels of modules (default: as many as can be read, all at the peak)",
    )
    picture.add_argument(
        "--expand",
        action="store_true",
        help="show every operation, and each of the blocks that repeat",
    )
    picture.add_argument("--plan", metavar="FILE", help="show a plan of fxmem plan -o on the step")
    add_strategy_option(picture)
    picture.add_argument("--debug", action="store_true", help="show tracebacks")


def run_command(arguments: argparse.Namespace) -> int:
    """Analyses a target, or reads a report, and draws it."""
    target: str = arguments.target
    is_report = target.lower().endswith(".json")
    report = read_text(target, "report", "fxmem analyze --json -o writes one") if is_report else ""
    kind = _choose_format(arguments)
    plan = None if arguments.plan is None else read_plan(arguments.plan)
    options = RenderOptions(arguments.view, arguments.depth, arguments.expand, plan)
    view = find_view(kind, options)
    is_planned = view == TRADEOFF or (plan is not None and view in (TIMELINE, SNAPSHOT))
    if is_report and (is_planned or (view == REPORT and kind != "html")):
        raise UsageError(
            f"{target} is a saved report, which lacks what this needs",
            hint="name the model instead",
        )
    check_output(arguments.output)
    with show_progress(f"drawing {target}"):
        analysis = (
            _read_report(arguments, report) if is_report else analyze_step(parse_step(arguments))
        )
        trains = plan is not None and plan.mode == "train"
        if view == TRADEOFF or (kind == "html" and trains and not is_report):
            style = None if plan is None else plan.style
            front = fxmem.pareto(analysis, style=style, strategy=arguments.strategy)
            options = replace(options, front=front)
        drawn = render_as(analysis, kind, options)
    write_output(drawn, arguments.output)
    return 0


def _choose_format(arguments: argparse.Namespace) -> str:
    if arguments.format is None:
        kind = "dot" if arguments.output is None else find_format(arguments.output)
    else:
        kind = arguments.format.lower().removeprefix(".")
    find_view(kind, RenderOptions(arguments.view))
    if arguments.output is None and not FORMATS[kind].is_text:
        raise UsageError(f"cannot write {kind} to stdout", hint=f"write to a file: -o peak.{kind}")
    return kind


def _read_report(arguments: argparse.Namespace, report: str) -> Analysis:
    from fxmem.analysis import Analysis

    if given := list_given(arguments):
        raise UsageError(
            f"{arguments.target} is a saved report: {given[0]} is for a model", hint="leave it out"
        )
    return Analysis.from_json(report)

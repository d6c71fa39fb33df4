"""``fxmem render``: a picture of one step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxmem.cli.output import check_output, read_plan, read_text, write_output
from fxmem.cli.progress import show_progress
from fxmem.cli.step import TARGET_HELP, add_step_options, analyze_step, parse_step
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan
    from fxmem.report.formats import RenderOptions

_DESCRIPTION = f"""\
Draws the operations of a step with what each makes, saves for backward and has alive at
the peak, in the modules that they belong to. TARGET may also be a report that was saved
with fxmem analyze --json -o FILE.json.

Blocks that repeat are drawn once, and modules are opened as far as a reader can take in,
those around the peak to the last operation.

{TARGET_HELP}"""
_EPILOG = """\
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


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the parser of ``fxmem``.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "render",
        help="a picture of one step, its peak marked",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_step_options(parser, checks_fit=False)
    step_options = [a.dest for a in parser._actions if a.dest not in ("help", "target")]
    parser.set_defaults(run=run_render, parser=parser, step_options=step_options)
    _add_picture_options(parser)


def _add_picture_options(parser: argparse.ArgumentParser) -> None:
    picture = parser.add_argument_group("the picture")
    picture.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to FILE instead of stdout; its suffix chooses the format: .svg, .png, "
        ".pdf, .dot, .html or .pickle",
    )
    picture.add_argument(
        "--format",
        metavar="NAME",
        help="svg, png, pdf, dot, html or pickle (default: by FILE, else dot)",
    )
    picture.add_argument(
        "--view",
        metavar="NAME",
        help="graph, timeline or tradeoff (default: graph, or what the format is for)",
    )
    picture.add_argument(
        "--depth",
        type=int,
        metavar="N",
        help="open N levels of modules (default: as many as can be read, all at the peak)",
    )
    picture.add_argument(
        "--expand",
        action="store_true",
        help="every operation, and each of the blocks that repeat",
    )
    picture.add_argument("--plan", metavar="FILE", help="lay a plan of fxmem plan -o over it")
    picture.add_argument("--debug", action="store_true", help="show tracebacks")


def run_render(arguments: argparse.Namespace) -> int:
    """Analyses a target, or reads a report, and draws it.

    Args:
        arguments: What the parser of this command returned.

    Returns:
        The exit code: 0.

    Raises:
        FxmemError: Bad usage, a model that cannot be loaded or traced, or no Graphviz.
    """
    from fxmem.report.formats import TRADEOFF, RenderOptions, find_view, render

    # Mistakes in the arguments are reported before torch is imported and the model is run.
    kind = _choose_format(arguments)
    plan = None if arguments.plan is None else read_plan(arguments.plan)
    options = RenderOptions(arguments.view, arguments.depth, arguments.expand, plan)
    find_view(kind, options)
    _check_target(arguments.target, kind, options)
    check_output(arguments.output)
    with show_progress(f"drawing {arguments.target}"):
        analysis = _find_analysis(arguments)
        if options.view == TRADEOFF or _tells_trades(kind, arguments.target, plan):
            options = replace(options, front=_find_front(analysis, plan))
        drawn = render(analysis, kind, options)
    write_output(drawn, arguments.output)
    return 0


def _choose_format(arguments: argparse.Namespace) -> str:
    from fxmem.report.formats import FORMATS, RenderOptions, find_format, find_view

    if arguments.format is None:
        kind = "dot" if arguments.output is None else find_format(arguments.output)
    else:
        kind = arguments.format.lower().removeprefix(".")
    find_view(kind, RenderOptions(arguments.view))
    if arguments.output is None and not FORMATS[kind].is_text:
        raise UsageError(f"{kind} is not for stdout", hint=f"write to a file: -o peak.{kind}")
    return kind


def _check_target(target: str, kind: str, options: RenderOptions) -> None:
    from fxmem.report.formats import needs_model

    if _is_report(target) and needs_model(kind, options):
        raise UsageError(
            f"{target} is a saved report, which lacks what plans need",
            hint="name the model instead",
        )


def _is_report(target: str) -> bool:
    return target.lower().endswith(".json")


def _tells_trades(kind: str, target: str, plan: Plan | None) -> bool:
    """Tells whether what is written tells the trade-offs besides, where they can be worked out."""
    return kind == "html" and plan is not None and plan.mode == "train" and not _is_report(target)


def _find_front(analysis: Analysis, plan: Plan | None) -> tuple[Plan, ...]:
    from fxmem.planning.planner import pareto

    return pareto(analysis, style=None if plan is None else plan.style)


def _find_analysis(arguments: argparse.Namespace) -> Analysis:
    target: str = arguments.target
    if not _is_report(target):
        return analyze_step(parse_step(arguments))
    from fxmem.report.json_report import read_analysis

    default = arguments.parser.get_default
    given = [n for n in arguments.step_options if getattr(arguments, n) != default(n)]
    if given:
        option = given[0].replace("_", "-").removesuffix("s")
        raise UsageError(
            f"{target} is a saved report: --{option} is for a model", hint="leave it out"
        )
    return read_analysis(read_text(target, "report"))

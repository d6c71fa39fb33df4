"""``fxmem analyze``: the peak of one step and what is alive there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fxmem.cli.output import check_output, choose_width, write_line, write_output
from fxmem.cli.progress import show_progress
from fxmem.cli.step import (
    TARGET_HELP,
    add_step_options,
    analyze_step,
    parse_budget,
    parse_step,
)
from fxmem.errors import UsageError
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

EXIT_OVER_BUDGET = 1

_DESCRIPTION = f"""\
Runs one training step of the model on fake tensors (which take no memory) and
reports its peak memory, where it lies, and what is alive there.

{TARGET_HELP}"""
_EPILOG = """\
examples:
  fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem analyze 'gpt.py:GPT(layers=24)' --input 4x512:int64 --budget 8GiB
  fxmem analyze nets.bert:build --input ids=8x128:int64 --input mask=8x128:int64
  fxmem analyze unet.py:UNet --input 1x3x256x256 --mode infer --json -o unet.json

exit codes: 0 fine, 1 over --budget, 2 bad usage or a model that cannot be loaded or traced
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the parser of ``fxmem``.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "analyze",
        help="the peak of one step and what is alive there",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_analyze, parser=parser)
    add_step_options(parser)
    _add_output_options(parser)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the result")
    output.add_argument("--budget", metavar="SIZE", help="exit 1 if the peak is over it, e.g. 8GiB")
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    output.add_argument("--nodes", action="store_true", help="add a table of all nodes")
    output.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="storages to list at the peak (default: %(default)s)",
    )
    output.add_argument("--debug", action="store_true", help="show tracebacks")


def run_analyze(arguments: argparse.Namespace) -> int:
    """Analyses a target and writes the result.

    Args:
        arguments: What the parser of this command returned.

    Returns:
        The exit code: 0, or 1 where the peak is over the budget.

    Raises:
        FxmemError: Bad usage, or a model that cannot be loaded or traced.
    """
    # Mistakes in the arguments are reported before torch is imported and the model is run.
    step = parse_step(arguments)
    budget_bytes = None if arguments.budget is None else parse_budget(arguments.budget)
    if arguments.top < 0:
        raise UsageError(f"--top must be 0 or more, got {arguments.top}")
    check_output(arguments.output)

    with show_progress(f"analysing {arguments.target}"):
        analysis = analyze_step(step)
        text = _render(analysis, arguments)
    write_output(text, arguments.output)
    return max(_check_budget(analysis, budget_bytes), _check_fit(analysis))


def _render(analysis: Analysis, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return analysis.to_json(indent=2) + "\n"
    from fxmem.report.document import build_document
    from fxmem.report.text import render_text

    width = choose_width(arguments.output)
    document = build_document(analysis)
    return render_text(document, top=arguments.top, nodes=arguments.nodes, width=width)


def _check_budget(analysis: Analysis, budget_bytes: int | None) -> int:
    if budget_bytes is None or analysis.peak_bytes <= budget_bytes:
        return 0
    over = format_bytes(analysis.peak_bytes - budget_bytes)
    peak, budget = format_bytes(analysis.peak_bytes), format_bytes(budget_bytes)
    write_line(f"fxmem: over budget: the peak of {peak} is {over} over {budget}")
    return EXIT_OVER_BUDGET


def _check_fit(analysis: Analysis) -> int:
    gpu, ran_out = analysis.gpu, analysis.exhaustion
    if gpu is None or ran_out is None:
        return 0
    verb = "does" if ran_out.is_certain else "may"
    write_line(f"fxmem: the step {verb} not fit {gpu.name}: {ran_out.cause}")
    return EXIT_OVER_BUDGET

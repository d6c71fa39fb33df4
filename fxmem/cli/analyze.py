"""``fxmem analyze``: the peak of one step and what is alive there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.shared.step import (
    add_compile_options,
    add_count,
    add_step_options,
    analyze_step,
    parse_step,
)
from fxmem.errors import UsageError
from fxmem.report.text import DEPTH
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

HELP = "the peak of one step and what is alive there"
DESCRIPTION = """\
Runs one training step of the model on fake tensors (which take no memory) and
reports its peak memory, where it lies, and what is alive there."""
EPILOG = """\
examples:
  fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem analyze 'gpt.py:GPT(layers=24)' --input 4x512:int64 --budget 8GiB
  fxmem analyze nets.bert:build --input ids=8x128:int64 --input mask=8x128:int64
  fxmem analyze unet.py:UNet --input 1x3x256x256 --mode infer --json -o unet.json

exit codes: 0 fine, 1 over --budget or too large for the --gpu, 2 bad usage or a model that
cannot be loaded or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser)
    add_compile_options(parser, can_ask=True)
    output = add_step_output(parser)
    output.add_argument("--nodes", action="store_true", help="add a table of all nodes")
    output.add_argument("--modules", action="store_true", help="add a table of the modules")
    add_count(output, "--depth", f"levels of --modules (default: {DEPTH})")


def add_step_output(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options of a report on a step."""
    output = add_output_options(
        parser, budget="exit 1 if the peak is over it, e.g. 8GiB", has_step=True
    )
    add_count(output, "--top", "storages to list at the peak", 10)
    return output


def run_command(arguments: argparse.Namespace) -> int:
    """Analyses a target and writes the result."""
    step = parse_step(arguments)
    if arguments.top < 0:
        raise UsageError(f"--top must be 0 or more, got {arguments.top}")
    if arguments.depth is not None and (arguments.depth < 1 or not arguments.modules):
        cause = "must be 1 or more" if arguments.modules else "is for the table of --modules"
        raise UsageError(f"--depth {cause}", hint="--modules --depth 2")
    kind = choose_format(arguments)
    with show_progress(f"analysing {arguments.target}"):
        analysis = analyze_step(step)
        depth = (arguments.depth or DEPTH) if arguments.modules else None
        shown = {"top": arguments.top, "nodes": arguments.nodes, "depth": depth}
        write_result(analysis, kind, arguments.output, **shown)
    return check_fit(analysis, arguments.budget)


def check_fit(analysis: Analysis, budget_bytes: int | None) -> int:
    """Writes a line for each limit that a step exceeds, and chooses the exit code."""
    code, peak_bytes, ran_out = 0, analysis.peak_bytes, analysis.exhaustion
    if budget_bytes is not None and peak_bytes > budget_bytes:
        peak, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
        over = format_bytes(peak_bytes - budget_bytes)
        write_line(f"fxmem: over budget: the peak of {peak} is {over} over {budget}")
        code = EXIT_FINDING
    if analysis.gpu is not None and ran_out is not None:
        verb = "does" if ran_out.is_certain else "may"
        cause = f"not fit {analysis.gpu.name}: {ran_out.cause}"
        if analysis.setup.compile == "left out":
            write_line(f"fxmem: eager would {cause}; the script compiles")
            return code
        write_line(f"fxmem: the step {verb} {cause}")
        code = EXIT_FINDING
    return code

"""``fxmem explain``: what a finding is, or why a storage is alive at the peak."""

from __future__ import annotations

import argparse
import re

from fxmem.cli.output import check_output, choose_width, show_progress, write_output
from fxmem.cli.step import add_step_options, analyze_step, parse_step
from fxmem.errors import UsageError
from fxmem.finding import explain_code, find_code
from fxmem.report.blocks import render_text
from fxmem.report.explanation import explain_storage
from fxmem.report.tables import wrap

HELP = "a finding, or why a storage is alive at the peak"
DESCRIPTION = """\
With the code of a finding, such as FX101, explains it: why memory is taken, and the code before
and after. With a TARGET and a NODE, explains why that node's result or that storage is alive at
the peak: the line that made it, what saved and what holds it, and when it is freed."""
EPILOG = """\
examples:
  fxmem explain FX101
  fxmem explain resnet.py:ResNet18 stem.0 --input 8x3x224x224 --optimizer adam
  fxmem explain gpt.py:GPT 'gradient of head' --input 4x512:int64

exit codes: 0 fine, 2 bad usage, or a model that cannot be loaded or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False)
    parser.add_argument(
        "node", metavar="NODE", nargs="?", help="a node, or a storage as the report names it"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def run_command(arguments: argparse.Namespace) -> int:
    """Writes the text on a code, or analyses a target and explains a storage."""
    if re.fullmatch(r"(?i)fx\d*", arguments.target) or find_code(arguments.target):
        write_output(_wrap_markdown(explain_code(arguments.target), choose_width(None)), None)
        return 0
    if arguments.node is None:
        raise UsageError(
            "explain needs the code of a finding, or a TARGET and a NODE",
            hint=f"fxmem explain FX101, or fxmem explain {arguments.target} NODE",
        )
    step = parse_step(arguments)
    check_output(None)
    with show_progress(f"analysing {arguments.target}"):
        analysis = analyze_step(step)
        blocks = explain_storage(analysis, arguments.node)
    write_output(render_text(blocks, choose_width(None)), None)
    return 0


def _wrap_markdown(text: str, width: int | None) -> str:
    """Wraps the paragraphs of Markdown, without links; code and tables stay as they are."""
    parts = re.split(r"(^```.*?^```\n)", text, flags=re.DOTALL | re.MULTILINE)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", parts[at])
        if width is not None:
            parts[at] = re.sub(
                r"^(?:[^|\n].*\n)+",
                lambda paragraph: f"{wrap(' '.join(paragraph[0].split()), width)}\n",
                parts[at],
                flags=re.MULTILINE,
            )
    return "".join(parts)

"""``fxmem explain``: what a finding is, or why a storage is alive at the peak."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import TYPE_CHECKING

from fxmem.cli.shared.output import check_output, choose_width, show_progress, write_output
from fxmem.cli.shared.step import add_step_options, analyze_step, parse_step
from fxmem.errors import UsageError
from fxmem.finding import explain_code, find_code
from fxmem.graph import Phase, Storage
from fxmem.memory.holders import find_holder
from fxmem.memory.labels import label_operator
from fxmem.report.blocks import Block, Heading, Paragraph, render_text
from fxmem.report.document import build_document
from fxmem.report.tables import wrap
from fxmem.report.text import write_headline, write_place, write_shape, write_subject
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

_MOST = 5
_INDENT = 12
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


def explain_storage(analysis: Analysis, name: str) -> list[Block]:
    """Lists why the storages of a name are alive at the peak.

    Args:
        analysis: The analysed step.
        name: A node, or a storage as the report prints it, shortened by ``...`` or not.

    Raises:
        UsageError: Nothing is called so.
    """
    graph, labels, step = analysis.allocated_graph, analysis.labels, analysis.peak.step
    pattern = re.compile(re.escape(name).replace(re.escape("..."), ".*"))
    indices = [index for index, label in enumerate(labels) if pattern.fullmatch(label)]
    for node in analysis.nodes:
        if pattern.fullmatch(node.name):  # of a view, the storage that it shares
            indices += node.results
    if not indices:
        known = dict.fromkeys([*labels, *(node.name for node in analysis.nodes)])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "fxmem analyze --nodes lists the names"
        raise UsageError(f"no node or storage is called {name!r}", hint=hint)
    found = [graph.storages[index] for index in dict.fromkeys(indices)]
    alive = [s for s in found if s.born <= step and (s.died is None or s.died >= step)]
    held = format_bytes(sum(s.nbytes for s in alive)) if alive else "nothing"
    shown = sorted(alive or found, key=lambda storage: -storage.nbytes)
    headline = write_headline(build_document(analysis).headline)
    more = [Paragraph([f"... and {len(shown) - _MOST} more"])] if len(shown) > _MOST else []
    return [
        Heading(f"{name} holds {held} at the peak", [headline, write_subject(analysis.setup)]),
        *(_list_rows(analysis, storage) for storage in shown[:_MOST]),
        *more,
    ]


def _list_rows(analysis: Analysis, storage: Storage) -> Paragraph:
    graph, nodes = analysis.graph, analysis.nodes

    def locate(index: int) -> str:
        operation = graph.operations[index]
        if operation.phase is Phase.OPTIMIZER:
            return "the optimizer step"
        node = None if operation.node is None else nodes[operation.node]
        name, source = (node.name, node.source) if node else (None, None)
        return write_place(operation.phase, name, source)

    label, tensor = analysis.labels[storage.index], f"{write_shape(storage.shape)}:{storage.dtype}"
    size = f"{format_bytes(storage.nbytes)}, {storage.category.value}, {tensor}"
    rows = [("storage", f"{label}, {size}")]
    if storage.born < 0:
        rows.append(("made", "before this step"))
    else:
        operator = label_operator(graph.operations[storage.born])
        rows.append(("made by", f"{operator} in {locate(storage.born)}"))
    for save in (save for save in graph.saves if save.storage == storage.index):
        saver = "code outside of nodes" if save.node is None else nodes[save.node].name
        user = "" if save.unpacked is None else graph.operations[save.unpacked].autograd_node
        key = "" if rows[-1][0] in ("saved by", "") else "saved by"
        rows.append((key, f"{saver}, for {user}" if user else saver))
    rows.append(("held by", find_holder(graph, storage.index, analysis.peak.step)))
    let_go = graph.let_go[storage.index] if graph.let_go else None
    if let_go is not None and storage.born >= 0:
        rows.append(("let go", f"by the code in {locate(let_go)}"))
    freed = "not within the step" if storage.died is None else f"after {locate(storage.died)}"
    lines = [f"{key:{_INDENT}}{text}" for key, text in (*rows, ("freed", freed))]
    return Paragraph(lines, indent=" " * _INDENT)

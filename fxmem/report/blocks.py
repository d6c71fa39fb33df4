"""The blocks of a report, and the text, Markdown and CSV that are made of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from fxmem.report.tables import Table, escape_controls, wrap, write_table


@dataclass(frozen=True, slots=True)
class Heading:
    """The answer in one line, and lines on the step that it is about."""

    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences, each on a line of its own; ``indent`` is put before all but its first."""

    lines: Sequence[str]
    indent: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of code under a title, which are not wrapped."""

    title: str
    lines: Sequence[str]


Block = Heading | Paragraph | Listing | Table


def render_text(blocks: Iterable[Block], width: int | None = None) -> str:
    """Writes blocks as text for a terminal of a width, or for a file, with blank lines between.

    >>> print(render_text([Heading("Peak 2 B", ["Net"]), Paragraph([])]), end="")
    Peak 2 B
    Net
    """
    lines = "\n\n".join(filter(None, (_write_text(each, width) for each in blocks))).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _write_text(block: Block, width: int | None) -> str:
    if isinstance(block, Table):
        return write_table(block, width)
    if isinstance(block, Listing):
        code = [escape_controls(f"  {line}") for line in block.lines]
        return "\n".join([block.title, *code]) if code else ""
    indent = block.indent if isinstance(block, Paragraph) else ""
    head = [escape_controls(block.text)] if isinstance(block, Heading) else []
    return "\n".join([*head, *(wrap(line, width, indent) for line in block.lines)])


def render_markdown(blocks: Iterable[Block]) -> str:
    """Writes blocks as Markdown, for the summary of a run in CI or for a comment."""
    parts: list[str] = []
    for block in blocks:
        if isinstance(block, Table):
            parts += [escape_controls(block.title), _write_rows(block), escape_controls(block.rest)]
        elif isinstance(block, Listing):
            code = "\n".join(map(escape_controls, block.lines))
            parts += [block.title, f"```python\n{code}\n```"] if code else []
        else:
            parts += [f"### {escape_controls(block.text)}"] if isinstance(block, Heading) else []
            parts += map(escape_controls, block.lines)
    return "\n\n".join(filter(None, parts)) + "\n"


def _write_rows(table: Table) -> str:
    shown = table.drop_empty()
    rules = ["--:" if header in table.right else ":--" for header in shown.headers]
    cells = [[escape_controls(str(c)).replace("|", "\\|") for c in row] for row in shown.rows]
    lines = [f"| {' | '.join(row)} |" for row in (shown.headers, rules, *cells)]
    return "\n".join(lines) if table.rows else ""


def render_csv(blocks: Iterable[Block]) -> str:
    """Writes the tables of a report as CSV, a blank line between two; bytes are integers."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for table in (block for block in blocks if isinstance(block, Table) and block.rows):
        rows = ([int(c) if isinstance(c, int) else c for c in row] for row in table.rows)
        writer.writerows(chain([()] if file.tell() else [], [table.headers], rows))
    return file.getvalue()

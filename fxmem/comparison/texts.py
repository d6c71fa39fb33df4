"""Reports of a headline, lines and tables, as plain text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.report.tables import escape_controls, join_blocks, wrap, write_table

_RIGHT = ("before", "after", "change", "bytes", "peak", "budget")
_NAMES = ("module", "storage at the peak", "source", "check")
_OPTIONAL = ("dtype", "shape")


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and a line on the rows that it leaves out."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    rest: str = ""


def write_report(
    title: str,
    lines: Sequence[str],
    tables: Iterable[Table],
    *,
    width: int | None = None,
    markdown: bool = False,
) -> str:
    """Writes a report; tables without rows are left out."""
    if not markdown:
        head = "\n".join([escape_controls(title), *(wrap(line, width) for line in lines)])
        return join_blocks([head, *(_write_table(table, width) for table in tables if table.rows)])
    blocks = [f"### {escape_controls(title)}", *map(escape_controls, lines)]
    return join_blocks([*blocks, *(_write_markdown(table) for table in tables if table.rows)])


def _write_table(table: Table, width: int | None) -> str:
    text = write_table(
        table.headers, table.rows, right=_RIGHT, names=_NAMES, optional=_OPTIONAL, width=width
    )
    return f"{text}\n{table.rest}" if table.rest else text


def _write_markdown(table: Table) -> str:
    rules = ("--:" if header in _RIGHT else ":--" for header in table.headers)
    cells = [[escape_controls(c).replace("|", "\\|") for c in row] for row in table.rows]
    rows = [table.headers, tuple(rules), *cells]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{text}\n\n{table.rest}" if table.rest else text

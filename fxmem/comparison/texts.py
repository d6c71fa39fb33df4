"""Reports of a headline, lines and tables, as plain text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from fxmem.comparison.changes import Change
from fxmem.comparison.footprints import Footprint, LiveStorage
from fxmem.report.tables import Table, escape_controls, join_blocks, wrap
from fxmem.report.text import write_shape, write_source
from fxmem.units import format_bytes

_RIGHT = ("before", "after", "change", "bytes", "peak", "budget")
_NAMES = ("module", "storage at the peak", "source", "check")
_OPTIONAL = ("dtype", "shape")
_TENSOR = ("category", "storage at the peak", "shape", "dtype", "source")
SIZES = ("before", "after", "change")
_Storage = TypeVar("_Storage", LiveStorage, Change)


def list_storages(peak: Footprint, top: int, title: str = "") -> Table:
    """Lists the largest storages alive at a peak, those that are alike in one row."""
    groups = _group(peak.live)
    groups.sort(key=lambda group: -sum(storage.nbytes for storage in group))
    rows = [(format_bytes(sum(s.nbytes for s in g)), *_describe(g)) for g in groups[:top]]
    rest = [storage for group in groups[top:] for storage in group]
    more = f"... and {len(rest)} more, {format_bytes(sum(s.nbytes for s in rest))}"
    return Table(["bytes", *_TENSOR], rows, rest=more if rest else "", title=title)


def list_changes(changes: Sequence[Change], top: int, title: str = "") -> Table:
    """Lists storages at the peak that differ, those that are alike in one row.

    Those that grew come first, or those that shrank where these are more.
    """
    groups = _group(changes)
    sign = -1 if sum(change.growth_bytes for change in changes) < 0 else 1
    groups.sort(key=lambda group: -sign * sum(change.growth_bytes for change in group))
    rows = []
    for group in groups[:top]:
        before, after = (sum(c.before_bytes for c in group), sum(c.after_bytes for c in group))
        rows.append((*write_sizes(before, after), *_describe(group)))
    rest = [change for group in groups[top:] for change in group]
    more = f"... and {len(rest)} more, {write_growth(sum(c.growth_bytes for c in rest))}"
    return Table([*SIZES, *_TENSOR], rows, rest=more if rest else "", title=title)


def _group(storages: Iterable[_Storage]) -> list[list[_Storage]]:
    """Groups storages that differ in their modules alone, as those of blocks that repeat."""
    groups: dict[object, list[_Storage]] = {}
    for each in storages:
        grows = isinstance(each, Change) and each.growth_bytes > 0
        key = each.category, each.shape, each.dtype, each.source, grows
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _describe(group: Sequence[LiveStorage | Change]) -> tuple[str, ...]:
    of = group[0]
    label = f"{of.label} and {len(group) - 1} alike" if len(group) > 1 else of.label
    tensor = (of.category.value, label, write_shape(of.shape), of.dtype)
    return *tensor, write_source(of.source)


def write_growth(nbytes: int) -> str:
    """Writes a change of a size, with its sign."""
    return f"{'+' if nbytes > 0 else ''}{format_bytes(nbytes)}"


def write_sizes(before: int, after: int) -> tuple[str, str, str]:
    """Writes a size before and after a change, and the change."""
    change = write_growth(after - before) if after != before else "-"
    return format_bytes(before), format_bytes(after), change


def write_report(
    title: str,
    lines: Sequence[str],
    tables: Iterable[Table],
    *,
    width: int | None = None,
    markdown: bool = False,
) -> str:
    """Writes a report; tables without title and rows are left out."""
    shown = [table for table in tables if table.title or table.rows]
    if markdown:
        blocks = map(_write_markdown, shown)
        return join_blocks([f"### {escape_controls(title)}", *map(escape_controls, lines), *blocks])
    head = "\n".join([escape_controls(title), *(wrap(line, width) for line in lines)])
    fitted = (
        replace(table, right=_RIGHT, names=_NAMES, optional=_OPTIONAL, width=width)
        for table in shown
    )
    return join_blocks([head, *fitted])


def _write_markdown(table: Table) -> str:
    rules = ("--:" if header in _RIGHT else ":--" for header in table.headers)
    cells = [[escape_controls(c).replace("|", "\\|") for c in row] for row in table.rows]
    rows = [table.headers, tuple(rules), *cells]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows) if table.rows else ""
    return "\n\n".join(filter(None, [escape_controls(table.title), text, table.rest]))

"""Tables of storages at peaks, and of their changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from fxmem.comparison.changes import Change
from fxmem.comparison.footprints import Footprint
from fxmem.report.document import LiveRow
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_shape, write_source
from fxmem.units import format_bytes

_TENSOR = ("category", "storage at the peak", "shape", "dtype", "source")
_NAMES, _OPTIONAL = ("storage at the peak", "source"), ("dtype", "shape")
SIZES = ("before", "after", "change")
_Storage = TypeVar("_Storage", LiveRow, Change)


def list_storages(peak: Footprint, top: int, title: str = "") -> Table:
    """Lists the largest storages alive at a peak, equal ones in one row."""
    groups = _group(peak.live)
    groups.sort(key=lambda group: -sum(storage.nbytes for storage in group))
    rows: list[Sequence[Cell]] = [
        (Bytes(sum(s.nbytes for s in g)), *_describe(g)) for g in groups[:top]
    ]
    rest = [storage for group in groups[top:] for storage in group]
    more = f"... and {len(rest)} more, {format_bytes(sum(s.nbytes for s in rest))}"
    headers, left = ["bytes", *_TENSOR], more if rest else ""
    return Table(headers, rows, ["bytes"], _NAMES, _OPTIONAL, rest=left, title=title)


def list_changes(changes: Sequence[Change], top: int) -> Table:
    """Lists storages at the peak that differ, equal ones in one row.

    The ones that grew come first, unless more shrank.
    """
    groups = _group(changes)
    sign = -1 if sum(change.growth_bytes for change in changes) < 0 else 1
    groups.sort(key=lambda group: -sign * sum(change.growth_bytes for change in group))
    rows = []
    for group in groups[:top]:
        before, after = (sum(c.before_bytes for c in group), sum(c.after_bytes for c in group))
        rows.append((*list_sizes(before, after), *_describe(group)))
    rest = [change for group in groups[top:] for change in group]
    more = f"... and {len(rest)} more, {Growth(sum(c.growth_bytes for c in rest))}"
    headers, left = [*SIZES, *_TENSOR], more if rest else ""
    return Table(headers, rows, SIZES, _NAMES, _OPTIONAL, rest=left)


def _group(storages: Iterable[_Storage]) -> list[list[_Storage]]:
    """Groups storages that differ in their modules alone, as in blocks that repeat."""
    groups: dict[object, list[_Storage]] = {}
    for each in storages:
        grows = isinstance(each, Change) and each.growth_bytes > 0
        key = each.category, each.shape, each.dtype, each.source, grows
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _describe(group: Sequence[LiveRow | Change]) -> tuple[str, ...]:
    of = group[0]
    label = f"{of.label} and {len(group) - 1} alike" if len(group) > 1 else of.label
    tensor = (of.category.value, label, write_shape(of.shape), of.dtype)
    return *tensor, write_source(of.source)


class Growth(Bytes):
    """A change of a size, shown with its sign."""

    def __str__(self) -> str:
        return f"{'+' if self > 0 else ''}{format_bytes(self)}"


def list_sizes(before: int, after: int) -> tuple[Cell, Cell, Cell]:
    """Lists a size before and after a change, and the change."""
    return Bytes(before), Bytes(after), Growth(after - before) if after != before else "-"

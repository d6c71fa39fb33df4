"""Tables that fit a width: first columns go that can be missed, then long names are shortened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fxmem.report.cells import measure_width

_GAP = 2
_NARROWEST = 8


@dataclass(frozen=True, slots=True)
class Column:
    """How the cells under one header are shown.

    Attributes:
        right: Whether they are aligned to the right.
        shorten: Makes a cell fit a number of columns; None where every character counts.
        least: Columns that shortened cells still need to be legible.
        yields: Whether it is shortened before the others are.
    """

    right: bool = False
    shorten: Callable[[str, int], str] | None = None
    least: int = 0
    yields: bool = False


def write_table(
    columns: Mapping[str, Column],
    layouts: Sequence[Sequence[str]],
    rows: Sequence[Mapping[str, str]],
    width: int | None = None,
) -> str:
    """A table with its header and a rule under it.

    Args:
        columns: By header.
        layouts: The headers to show, from the widest choice to the narrowest. The first one
            that leaves all shortened cells legible is taken.
        rows: Cells by header, those of every layout. A column that is empty in all is left out.
        width: Columns that a line may take; None for as many as it needs.

    >>> columns = {"size": Column(right=True), "name": Column(), "note": Column()}
    >>> rows = [{"size": "12 B", "name": "fc", "note": "first"}]
    >>> print(write_table(columns, [("size", "name", "note"), ("size", "name")], rows, 12))
    size  name
    ----  ----
    12 B  fc
    """
    headers, widths = _choose_layout(columns, layouts, rows, width)
    table = [
        [_fit_cell(row[header], columns[header], widths[header]) for header in headers]
        for row in [{header: header for header in headers}, *rows]
    ]
    return _align(table, [columns[header].right for header in headers])


def _choose_layout(
    columns: Mapping[str, Column],
    layouts: Sequence[Sequence[str]],
    rows: Sequence[Mapping[str, str]],
    width: int | None,
) -> tuple[Sequence[str], dict[str, int]]:
    """The headers of the layout that fits, and the width of each column."""
    filled = {header for row in rows for header, cell in row.items() if cell}
    if filled:  # a column without a single entry says nothing
        layouts = [[header for header in headers if header in filled] for headers in layouts]
    if width is None:
        return layouts[0], _measure_columns(layouts[0], rows)
    for headers in layouts:
        widths = _measure_columns(headers, rows)
        least = {h: _find_least(columns[h], widths[h], columns[h].least) for h in headers}
        if _measure_line(least) <= width:
            break
    else:  # not even the last is legible there
        least = {h: _find_least(columns[h], widths[h], _NARROWEST) for h in headers}
    yielding = [header for header in headers if columns[header].yields]
    for group in (yielding, headers):
        _shrink(widths, group, least, width)
    return headers, widths


def _measure_columns(headers: Sequence[str], rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    return {h: max(map(measure_width, [h, *(row[h] for row in rows)])) for h in headers}


def _find_least(column: Column, natural: int, least: int) -> int:
    return min(natural, least) if column.shorten else natural


def _measure_line(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _shrink(
    widths: dict[str, int], group: Sequence[str], least: Mapping[str, int], width: int
) -> None:
    """Takes from the widest column of a group that may give, until a line fits."""
    while _measure_line(widths) > width:
        giving = [header for header in group if widths[header] > least[header]]
        if not giving:
            break
        widths[max(giving, key=widths.__getitem__)] -= 1


def _fit_cell(text: str, column: Column, width: int) -> str:
    return column.shorten(text, width) if column.shorten else text


def _align(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    header, *body = rows
    # As rows of their own: tabulate widens the columns of what it is told are headers.
    rules = ["-" * max(map(measure_width, column)) for column in zip(*rows, strict=True)]
    return tabulate(
        [header, rules, *body],
        tablefmt="plain",
        colalign=["right" if is_right else "left" for is_right in right],
        disable_numparse=True,  # it would rewrite a layer that is called "1e3"
    )

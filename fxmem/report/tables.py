"""Printable text, wrapped lines and tables within the width of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fxmem.units import format_bytes, format_flops

_ELLIPSIS, _GAP = "...", 2
# Columns of a shortened cell: where others are left out for it, where an optional one shrinks no
# more, and where none does.
_LEGIBLE, _NARROW, _NARROWEST = 20, 12, 8


def escape_controls(text: str) -> str:
    r"""Makes visible what is not printable: names come from models and files.

    A name may hold a newline, or an escape sequence that a terminal would obey.

    >>> print(escape_controls("conv\x1b[2J\n1"))
    conv\x1b[2J\n1
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def measure_width(text: str) -> int:
    """Returns the columns that printable text takes in a terminal.

    >>> measure_width("conv"), measure_width("卷积")
    (4, 4)
    """
    from wcwidth import wcswidth

    return max(wcswidth(text), 0)


def shorten(text: str, width: int) -> str:
    """Cuts text after a third where it takes more than that many columns.

    The end of a qualified name says what it is, the beginning where.

    >>> shorten("encoder.layers.11.attention.softmax", 20)
    'encod...tion.softmax'
    """
    if measure_width(text) <= width:
        return text
    room = max(width - len(_ELLIPSIS), 2)
    head, tail = text[: room // 3], text[room // 3 - room :]
    # Wide letters take two columns, and some letters none: measured as a whole.
    while tail and measure_width(f"{head}{_ELLIPSIS}{tail}") > width:
        head, tail = (head[:-1], tail) if 2 * len(head) > len(tail) else (head, tail[1:])
    return f"{head}{_ELLIPSIS}{tail}"


def wrap(text: str, width: int | None, indent: str = "") -> str:
    """Escapes and wraps a line between words; ``indent`` is put before all but the first."""
    text = escape_controls(text)
    if width is None:
        return text
    return "\n".join(textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False))


class Bytes(int):
    """A number of bytes: text with a unit where people read, an integer where programs do.

    >>> str(Bytes(2048)), Bytes(2048) + 0
    ('2.00 KiB', 2048)
    """

    def __str__(self) -> str:
        return format_bytes(self)


class Flops(int):
    """A number of floating-point operations, with a unit where people read."""

    def __str__(self) -> str:
        return format_flops(self)


Cell = str | int


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its header; a column without entries is left out.

    Columns of ``right`` are aligned so. To fit a width, cells of ``names`` are shortened, and
    columns of ``optional`` left out, in this order, until the others are legible. A ``title`` is
    above it, and a line on the ``rest`` that it leaves out below.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    names: Collection[str] = ()
    optional: Sequence[str] = ()
    rest: str = ""
    title: str = ""

    def drop_empty(self) -> Table:
        """Leaves out the columns without an entry."""
        kept = [at for at, _ in enumerate(self.headers) if any(row[at] != "" for row in self.rows)]
        rows = [[row[at] for at in kept] for row in self.rows]
        return replace(self, headers=[self.headers[at] for at in kept], rows=rows)


def write_table(table: Table, width: int | None = None) -> str:
    """Writes a table as text, with a rule under its header.

    >>> print(write_table(Table(["size", "name", "note"], [["12 B", "fc", ""]], right=["size"])))
    size  name
    ----  ----
    12 B  fc
    """
    from tabulate import tabulate  # not at the start: a message of the command line needs none

    shown, body = table.drop_empty(), ""
    if table.rows:
        cells = [[escape_controls(str(cell)) for cell in row] for row in shown.rows]
        columns = {h: [row[at] for row in cells] for at, h in enumerate(shown.headers)}
        widths = {h: max(map(measure_width, [h, *column])) for h, column in columns.items()}
        if width is not None:
            _fit(widths, table.names, table.optional, width)
        # The rule is a row of its own: tabulate widens the columns of what it is told are headers.
        lines = [
            [header, "-" * widths[header], *(shorten(c, widths[header]) for c in columns[header])]
            for header in widths
        ]
        body = tabulate(
            [*zip(*lines, strict=True)],
            tablefmt="plain",
            colalign=["right" if header in table.right else "left" for header in widths],
            disable_numparse=True,  # it would rewrite a layer that is called "1e3"
        )
    return "\n".join(filter(None, [wrap(table.title, width), body, table.rest]))


def _fit(
    widths: dict[str, int], names: Collection[str], optional: Sequence[str], width: int
) -> None:
    """Leaves out optional columns, then narrows the widest cells of names, until a line fits."""
    for header in optional:
        least = [min(w, _LEGIBLE) if h in names else w for h, w in widths.items()]
        if sum(least) + _GAP * (len(least) - 1) <= width:
            break
        widths.pop(header, None)
    yielding = [header for header in names if header in optional]
    for group, least_width in (yielding, _NARROW), (names, _NARROWEST):
        while sum(widths.values()) + _GAP * (len(widths) - 1) > width:
            giving = [h for h in group if widths.get(h, 0) > max(least_width, measure_width(h))]
            if not giving:
                break
            widths[max(giving, key=widths.__getitem__)] -= 1

"""Text that fits and is safe: names come from models and files that nobody has checked."""

from __future__ import annotations

from collections.abc import Sequence

from wcwidth import wcswidth

_ELLIPSIS = "..."


def escape_controls(text: str) -> str:
    r"""The text with everything that is not printable made visible.

    A name may hold a newline, or an escape sequence that a terminal would obey.

    >>> print(escape_controls("conv\x1b[2J\n1"))
    conv\x1b[2J\n1
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def measure_width(text: str) -> int:
    """Columns that printable text takes in a terminal.

    >>> measure_width("conv"), measure_width("卷积")
    (4, 4)
    """
    return max(wcswidth(text), 0)


def shorten_middle(text: str, width: int) -> str:
    """The text, cut in the middle where it is wider than that many columns.

    Both ends of a qualified name tell more than its middle.

    >>> shorten_middle("encoder.layers.11.attention.softmax", 20)
    'encoder.l....softmax'
    """
    if measure_width(text) <= width:
        return text
    room = max(width - len(_ELLIPSIS), 2)
    head = _take_columns(text, (room + 1) // 2)
    tail = _take_columns(text[::-1], room - measure_width(head))[::-1]
    return f"{head}{_ELLIPSIS}{tail}"


def _take_columns(text: str, width: int) -> str:
    taken = ""
    for character in text:
        if measure_width(taken + character) > width:
            break
        taken += character
    return taken


def fit_columns(
    rows: Sequence[Sequence[str]], flexible: Sequence[int], width: int, least: int = 12
) -> list[list[str]]:
    """The rows of a table, with some columns shortened until a line fits.

    Args:
        rows: Cells, the header row included.
        flexible: Indices of the columns that may be shortened.
        width: Columns of the terminal that a line may take.
        least: No column is made narrower than this.

    >>> fit_columns([["12 B", "encoder.layers.11.softmax"]], flexible=[1], width=22)
    [['12 B', 'encoder...oftmax']]
    """
    widths = [max(map(measure_width, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    while excess > 0:
        widest = max(flexible, key=lambda column: widths[column])
        if widths[widest] <= least:
            break
        widths[widest] -= 1
        excess -= 1
    return [
        [
            shorten_middle(cell, widths[column]) if column in flexible else cell
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]

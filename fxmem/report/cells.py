"""Text that fits and is safe: names come from models and files that nobody has checked."""

from __future__ import annotations

from wcwidth import wcswidth

_ELLIPSIS = "..."
_LEAST_NAME = 12


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
    tail = text[len(head) :]
    # Measured as a whole: what a character takes depends on those before it.
    while tail and measure_width(f"{head}{_ELLIPSIS}{tail}") > width:
        tail = tail[1:]
    return f"{head}{_ELLIPSIS}{tail}"


def shorten_name(text: str, width: int) -> str:
    """The text, its qualified name without what comes first where it is too wide.

    The last parts of a name tell what it is. Words before it stay, and of a list of names the
    first.

    >>> shorten_name("encoder.layers.11.attention.softmax", 24)
    '...11.attention.softmax'
    >>> shorten_name("gradient of encoder.layers.11.attention.softmax", 32)
    'gradient of ...attention.softmax'
    >>> shorten_name("encoder.norm1, encoder.norm2", 18)
    'encoder.norm1, ...'
    """
    if measure_width(text) <= width:
        return text
    name, comma, _ = text.partition(", ")
    rest = comma and f", {_ELLIPSIS}"
    words, space, name = name.rpartition(" ")
    room = width - measure_width(words + space + rest)
    if room < _LEAST_NAME:
        return shorten_middle(text, width)
    return f"{words}{space}{_drop_first_parts(name, room)}{rest}"


def _drop_first_parts(name: str, width: int) -> str:
    *parts, last = name.split(".")
    if measure_width(_ELLIPSIS + last) > width:
        if not parts or width < 2 * _LEAST_NAME:
            return shorten_middle(name, width)
        # Some room is for what is before: which of the layers it is.
        last = shorten_middle(last, width - _LEAST_NAME)
    if measure_width(".".join([*parts, last])) <= width:
        return ".".join([*parts, last])
    while parts and measure_width(_ELLIPSIS + ".".join([*parts, last])) > width:
        parts = parts[1:]
    return _ELLIPSIS + ".".join([*parts, last])


def _take_columns(text: str, width: int) -> str:
    taken = ""
    for character in text:
        if measure_width(taken + character) > width:
            break
        taken += character
    return taken

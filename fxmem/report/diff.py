"""Changes of code as a unified diff, which ``git apply`` and ``patch -p1`` read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from fxmem.report.tables import escape_controls


def render_diff(files: Iterable[tuple[str, str, str]], notes: Iterable[str] = ()) -> str:
    """A unified diff, after lines of comment.

    Args:
        files: For each, its path from the folder where the diff is applied, and its text before
            and after.
        notes: What to say above, a line each.

    Returns:
        Lines, each ended by a newline.

    >>> print(render_diff([("net.py", "x = 1\\n", "x = 2\\n")], ["one of two"]), end="")
    # one of two
    --- a/net.py
    +++ b/net.py
    @@ -1 +1 @@
    -x = 1
    +x = 2
    """
    lines = [f"# {escape_controls(note)}\n" for note in notes]
    for path, before, after in files:
        lines += _list_lines(path, before, after)
    return "".join(lines)


def _list_lines(path: str, before: str, after: str) -> Iterator[str]:
    names = (f"a/{path}", f"b/{path}")
    for line in difflib.unified_diff(_split(before), _split(after), *names):
        # What is at the end of a file may have no newline, and the diff must not invent one.
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _split(text: str) -> list[str]:
    # str.splitlines would split at form feeds too.
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]

"""Local variables read from source code: the line that assigns, the last that reads."""

from __future__ import annotations

import linecache
import zlib

import pytest

from fxmem.graph import SourceLocation
from fxmem.planning.dels.variables import find_last_read


def find(code: str) -> int | None:
    """Finds the last line that reads what the first one assigns to ``h``, counted from that one."""
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in code.split("\n"))
    file = f"written_{zlib.crc32(text.encode())}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    line = next(
        i for i, t in enumerate(text.splitlines(), 1) if t.strip().startswith(("h = ", "h, "))
    )
    found = find_last_read(SourceLocation(file, line, "forward"))
    return None if found is None else (found.code.end_lineno or 0) - line


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("h = f(x)\ny = g(h)\nreturn y", 1),
        ("h = f(x)\ny = g(\n  h,\n)\nreturn y", 3),
        ("h = f(x)\ny = torch.cat([h, x])\nreturn y", 1),
        ("h = f(x)\nreturn x", 0),  # nothing reads it
        ("h = f(x)\ny = g(h)\nh = f(y)\nreturn h", 1),  # another value of that name
        ("for m in ms:\n  h = f(x)\n  x = g(h)\nreturn x", 1),
        ("with torch.no_grad():\n  h = f(x)\n  x = g(h)\nreturn x", 1),
        ("if h is None:\n  h = f(x)\nx = g(h)\nreturn x", 1),
    ],
)
def test_the_last_line_that_reads(code: str, last: int) -> None:
    assert find(code) == last


@pytest.mark.parametrize(
    "code",
    [
        "h = f(x)\nh = g(h)\nreturn h",
        "h = f(x)\nreturn g(h)",
        "h = f(x)\ny = g(h)\ndel h\nreturn y",
        "h = f(x); y = g(h)\nreturn y",
        "h = f(x)\nfor m in ms:\n  x = m(h)\nreturn x",  # each round reads it
        "for m in ms:\n  x = g(h)\n  h = f(x)\nreturn x",  # the next round reads it
        "h = f(x)\nif h.any():\n  x = x + 1\nreturn x",
        "h = f(x)\nself.kept = h\nreturn x",
        "h = f(x)\ng = h\nreturn g(x)",
        "h = f(x)\nfound.append(h)\nreturn x",
        "h = f(x)\ny = (lambda: g(h))()\nreturn y",
        "h, y = f(x), x\ny = g(h)\nreturn y",
        "for m in ms:\n  h = f(x)\nx = g(h)\nreturn x",
        "h = f(x)\nkept = {'h': h}\nreturn x",
        "h = f(x)\nkept = x if x else h\nreturn x",
        "h = f(x)\nkept += [h]\nreturn x",
        "h = f(x)\ncache.update(h)\nreturn x",
        "h = f(x)\nout = Output(hidden=h)\nreturn x",
        "h = f(x)\ny = [g(h) for _ in x]\nreturn x",
        "global h\nh = f(x)\ny = g(h)\nreturn x",
        "h = k = f(x)\ny = g(h)\nreturn x",
    ],
)
def test_no_variable_where_del_would_not_do(code: str) -> None:
    assert find(code) is None

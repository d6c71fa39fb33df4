"""A line on stderr that says that work goes on, where a person is watching."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from fxmem.report.tables import escape_controls

_DELAY_S = 1.0
_CLEAR_LINE = "\r\x1b[K"


@contextlib.contextmanager
def show_progress(label: str, delay_s: float = _DELAY_S) -> Iterator[None]:
    """Shows a line with the elapsed time, from the first second on; clears it at the end.

    Args:
        label: What is being done.
        delay_s: Seconds before the line appears, and between its updates.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_update_line, args=(stream, label, delay_s, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _update_line(stream: TextIO, label: str, delay_s: float, done: threading.Event) -> None:
    start, shown = time.monotonic(), False
    while not done.wait(delay_s):
        elapsed_s = time.monotonic() - start
        stream.write(f"{_CLEAR_LINE}fxmem: {escape_controls(label)} ... {elapsed_s:.0f} s")
        stream.flush()
        shown = True
    if shown:
        stream.write(_CLEAR_LINE)
        stream.flush()

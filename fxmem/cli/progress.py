"""A line on stderr that says that work goes on; in a log, a line from time to time."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from fxmem.report.tables import escape_controls

_DELAY_S = 1.0
_LOG_DELAY_S = 10.0
_CLEAR_LINE = "\r\x1b[K"


@contextlib.contextmanager
def show_progress(
    label: str, delay_s: float | None = None, details: Callable[[], str] | None = None
) -> Iterator[None]:
    """Shows a line with the elapsed time, from the first second on; clears it at the end.

    Args:
        label: What is being done.
        delay_s: Seconds before the line appears, and between its updates.
        details: Says how far it is; where stderr is no terminal, each update is a line that stays.
    """
    stream = sys.stderr
    if details is None and not stream.isatty():
        yield
        return
    if delay_s is None:
        delay_s = _DELAY_S if stream.isatty() else _LOG_DELAY_S
    done = threading.Event()
    given = (stream, label, delay_s, done, details or (lambda: ""))
    thread = threading.Thread(target=_update_line, args=given, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _update_line(
    stream: TextIO,
    label: str,
    delay_s: float,
    done: threading.Event,
    details: Callable[[], str],
) -> None:
    start, shown, is_terminal = time.monotonic(), False, stream.isatty()
    while not done.wait(delay_s):
        elapsed_s = time.monotonic() - start
        line = f"fxmem: {escape_controls(label)} ... {elapsed_s:.0f} s{details()}"
        with contextlib.suppress(OSError):  # nobody reads it
            stream.write(f"{_CLEAR_LINE}{line}" if is_terminal else f"{line}\n")
            stream.flush()
        shown = is_terminal
    if shown:
        stream.write(_CLEAR_LINE)
        stream.flush()

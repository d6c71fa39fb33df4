"""Files that commands read and write, stdout, which may be a closed pipe, and progress."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fxmem.errors import UsageError
from fxmem.report.formats import FORMATS, RenderOptions, encode, find_format, find_view, render_as
from fxmem.report.tables import escape_controls
from fxmem.units import parse_bytes

if TYPE_CHECKING:
    from fxmem.planning.plan import Plan
    from fxmem.report.result import Result

EXIT_FINDING, EXIT_USAGE = 1, 2
_DELAY_S = 1.0
_LOG_DELAY_S = 10.0
_NAMES = {"text": "txt", "json": "json", "markdown": "md"}
_CLEAR_LINE = "\r\x1b[K"
_LEAST_WIDTH = 60
_LEAST_BUDGET_BYTES = 1 << 20
"""A number without a unit that is smaller is one whose unit was forgotten."""


def choose_width(path: str | None) -> int | None:
    """Chooses the columns that the tables of a result take; None for no limit.

    The environment variable COLUMNS, else the width of the terminal, and at least 60. A file
    (``path``) and a pipe have no width: a search or an editor needs whole names.
    """
    given = os.environ.get("COLUMNS", "")
    is_given = given.isdecimal() and int(given) > 0
    if not is_given and (path is not None or not sys.stdout.isatty()):
        return None
    columns = int(given) if is_given else os.get_terminal_size(sys.stdout.fileno()).columns
    return max(columns, _LEAST_WIDTH)


def parse_budget(text: str) -> int:
    """Reads a budget in bytes.

    Raises:
        UsageError: It is no size, or so small that its unit was forgotten.
    """
    budget_bytes = parse_bytes(text)
    if text.strip().isdecimal() and budget_bytes < _LEAST_BUDGET_BYTES:
        raise UsageError(
            f"a budget of {text.strip()} is {budget_bytes} bytes",
            hint=f"{text.strip()}GiB? {text.strip()}B if bytes are meant",
        )
    return budget_bytes


def add_output_options(
    parser: argparse.ArgumentParser,
    *,
    budget: str = "",
    has_step: bool = False,
    has_format: bool = False,
) -> argparse._ArgumentGroup:
    """Adds the options of a result, with a help for its budget.

    They are with ``has_step`` for pictures too, and with ``has_format`` for what CI reads.
    """
    group = parser.add_argument_group("the result")
    if budget:
        group.add_argument("--budget", type=parse_budget, metavar="SIZE", help=budget)
    group.add_argument("--json", action="store_true", help="everything, as JSON")
    what = "a report, a picture, a page or a snapshot" if has_step else "a report"
    help = f"write {what} to FILE, by its suffix: .txt, .md, .csv, .json, .html"
    group.add_argument("-o", "--output", metavar="FILE", help=help + ", .svg, ..." * has_step)
    group.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(has_step=has_step, format=None)
    if has_format:
        group.add_argument(
            "--format",
            choices=[*_NAMES],
            help="text, json or markdown (default: by FILE, else text)",
        )
    return group


def choose_format(arguments: argparse.Namespace) -> str:
    """Chooses the format of a result, and checks that it could be written, before the work.

    Raises:
        UsageError: It could not.
    """
    path = arguments.output
    check_output(path)
    if arguments.format is not None:
        return _NAMES[arguments.format]
    suffixes = tuple(suffix for entry in FORMATS.values() for suffix in entry.suffixes)
    if arguments.json or path is None or not path.lower().endswith(suffixes):
        return "json" if arguments.json else "txt"
    kind = find_format(path)
    if not (arguments.has_step or FORMATS[kind].is_report):
        reports = ", ".join(entry.suffixes[0] for entry in FORMATS.values() if entry.is_report)
        raise UsageError(f"this is not written as {kind}", hint=f"use {reports}")
    find_view(kind, RenderOptions())
    return kind


def write_result(result: Result, kind: str, path: str | None, **shown: Any) -> None:
    """Writes a result in a format to a file or to stdout; ``shown`` goes to ``list_blocks``."""
    options = RenderOptions(shown=shown, width=choose_width(path))
    write_output(render_as(result, kind, options), path)


@contextlib.contextmanager
def keep_stdout() -> Iterator[None]:
    """Keeps stdout for the result: what libraries and processes write to it goes to stderr."""
    stream = sys.stdout
    try:
        if stream.fileno() != 1:
            raise OSError
        own = os.dup(1)
        os.dup2(sys.stderr.fileno(), 1)
    except (AttributeError, OSError):  # none, one in memory, or Python's alone
        yield
        return
    with open(own, "w", encoding=stream.encoding, errors=stream.errors) as sys.stdout:
        try:
            yield
        finally:
            if os.name == "posix":
                ctypes.CDLL(None).fflush(None)  # what C has not written yet
            os.dup2(own, 1)
            sys.stdout = stream


def write_output(result: str | bytes, path: str | None) -> None:
    """Writes a result to a file, or to stdout where ``path`` is None.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        if path is not None:
            with open(path, "wb") as file:
                file.write(encode(result))
            return
        stream = sys.stdout
        if hasattr(stream, "reconfigure"):  # its encoding may lack the characters of a name
            stream.reconfigure(errors="backslashreplace")
        if isinstance(result, bytes):
            stream.buffer.write(result)
        else:
            stream.write(result)
        stream.flush()
    except BrokenPipeError:  # that reader (head, a pager) has seen enough
        _discard(sys.stdout)
    except OSError as error:
        if path is None:
            _discard(sys.stdout)
        place = "stdout" if path is None else repr(path)
        raise UsageError(f"cannot write {place}: {error.strerror}") from error


def read_plan(path: str) -> Plan:
    """Reads a plan that ``fxmem plan -o`` wrote.

    Raises:
        UsageError: It cannot be read, or is not a plan.
    """
    from fxmem.planning.plan import Plan

    return Plan.from_json(read_text(path, "plan", hint="fxmem plan -o writes one"))


def read_text(path: str, what: str, hint: str = "") -> str:
    """Reads a file.

    Args:
        path: The file.
        what: A word for it in errors.
        hint: The way to make such a file.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return read_bytes(path, what, hint).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the {what} {path!r}: not text", hint=hint) from error


def read_bytes(path: str, what: str, hint: str = "") -> bytes:
    """Reads a file that is no text; arguments and errors as for :func:`read_text`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        cause = f"cannot read the {what} {path!r}: {error.strerror}"
        raise UsageError(cause, hint=hint) from error


def write_line(text: str) -> None:
    """Writes a line to stderr, if anybody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def check_output(path: str | None) -> None:
    """Checks that a result could be written, before the work that leads to it.

    Raises:
        UsageError: stdout is closed, the file's folder is missing, or the file is a folder.
    """
    if path is None:
        if sys.stdout is None:
            raise UsageError("stdout is closed", hint="write to a file with -o FILE")
        return
    if not path:
        raise UsageError("-o needs the name of a file")
    real_path = os.path.realpath(path)
    folder = os.path.dirname(real_path)
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {path!r}: no folder {folder!r}", hint="create it first")
    if os.path.isdir(real_path):
        raise UsageError(f"cannot write {path!r}: it is a folder", hint="name a file in it")


def _discard(stream: TextIO) -> None:
    """Sends nowhere what is still buffered: it would fail again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
    stream, start = sys.stderr, time.monotonic()
    is_terminal, done = stream.isatty(), threading.Event()
    if details is None and not is_terminal:
        yield
        return

    def update_line() -> None:
        delay, shown = delay_s or (_DELAY_S if is_terminal else _LOG_DELAY_S), False
        while not done.wait(delay):
            more = details() if details else ""
            elapsed_s = time.monotonic() - start
            line = f"fxmem: {escape_controls(label)} ... {elapsed_s:.0f} s{more}"
            with contextlib.suppress(OSError):  # nobody reads it
                stream.write(f"{_CLEAR_LINE}{line}" if is_terminal else f"{line}\n")
                stream.flush()
            shown = is_terminal
        if shown:
            stream.write(_CLEAR_LINE)
            stream.flush()

    thread = threading.Thread(target=update_line, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

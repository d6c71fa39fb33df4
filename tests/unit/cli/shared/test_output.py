from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from fxmem.cli.shared.output import check_output, choose_width, write_output
from fxmem.errors import UsageError


@pytest.mark.parametrize(
    ("columns", "is_terminal", "path", "width"),
    [
        ("90", True, None, 90),
        ("90", False, None, 90),
        ("90", True, "result.txt", 90),
        ("20", True, None, 60),
        ("0", False, None, None),
        ("many", False, None, None),
        (None, False, None, None),
        (None, True, "result.txt", None),
        (None, True, None, 72),
    ],
)
def test_the_width_is_that_of_columns_or_the_terminal_or_none(
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
    is_terminal: bool,
    path: str | None,
    width: int | None,
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys.__stdout__, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((72, 24)))
    assert choose_width(path) == width


def test_a_write_that_fails_is_told() -> None:
    with pytest.raises(UsageError, match=r"^cannot write '/dev/full': No space left on device$"):
        write_output("text", "/dev/full")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("no/file", "cannot write 'no/file': no folder '{folder}/no' (create it first)"),
        ("", "-o needs the name of a file"),
        (".", "cannot write '.': it is a folder (name a file in it)"),
    ],
)
def test_what_cannot_be_written_is_told_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        check_output(path)
    assert str(caught.value) == error.format(folder=tmp_path)


def test_an_encoding_without_the_characters_is_no_error() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fxmem.cli.shared.output import write_output; write_output('ñ', None)",
        ],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout == rb"\xf1"


NOISY = """
import ctypes, subprocess, sys
from fxmem.cli.shared.output import keep_stdout, write_output

with keep_stdout():
    ctypes.CDLL(None).printf(b"a library\\n")
    subprocess.run(["echo", "a process"])
    write_output("the report\\n", None)
print("what comes after")
"""


def test_what_libraries_and_processes_print_stays_out_of_the_report() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert done.stdout == "the report\nwhat comes after\n"
    assert sorted(done.stderr.splitlines()) == ["a library", "a process"]


def test_a_terminal_gives_its_width_though_stderr_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library asks file 1, which is stderr while a command works."""
    text = (
        "from fxmem.cli.shared import output\n"
        "with output.keep_stdout(): print(output.choose_width(None))"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 77, 0, 0))
    subprocess.run(
        [sys.executable, "-c", text], stdout=follower, stderr=subprocess.DEVNULL, check=True
    )
    assert os.read(leader, 99) == b"77\r\n"

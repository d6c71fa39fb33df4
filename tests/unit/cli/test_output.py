from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxmem.cli.output import check_output, choose_width, write_output
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
            "from fxmem.cli.output import write_output; write_output('ñ', None)",
        ],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout == rb"\xf1"

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fxmem.cli.output import check_output, choose_width, write_output
from fxmem.errors import UsageError

WRITE = "from fxmem.cli.output import write_output; write_output('line\\n' * 100_000, None)"


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


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")
    path.chmod(0o640)
    write_output("new ñ\n", str(path))
    assert path.read_text(encoding="utf-8") == "new ñ\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["result.txt"]


def test_a_new_file_gets_the_permissions_that_open_gives(tmp_path: Path) -> None:
    write_output("text", str(tmp_path / "by_us"))
    (tmp_path / "by_open").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError) as caught:
        write_output("new", str(path))
    assert str(caught.value) == f"cannot write {str(path)!r}: No space left on device"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_output("text", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_a_device_is_written_to_and_not_replaced() -> None:
    check_output(os.devnull)
    write_output("text", os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_missing_folder_is_told_early(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "file")
    with pytest.raises(UsageError) as caught:
        check_output(path)
    assert str(caught.value) == (
        f"cannot write {path!r}: no folder {os.path.dirname(path)!r} (create it first)"
    )


def test_a_file_has_a_name() -> None:
    with pytest.raises(UsageError, match=r"^the file to write has no name \(-o FILE\)$"):
        check_output("")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        check_output(str(tmp_path))
    assert str(caught.value) == (
        f"cannot write {str(tmp_path)!r}: it is a folder (name a file in it)"
    )


def test_a_read_only_folder_is_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    path = str(tmp_path / "file")
    with pytest.raises(UsageError) as caught:
        check_output(path)
    assert str(caught.value) == (
        f"cannot write {path!r}: folder {str(tmp_path)!r} is read-only (choose another)"
    )


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stderr is not None
    assert writer.stdout.readline() == b"line\n"
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait() == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", WRITE], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.splitlines()[-1] == (
        "fxmem.errors.UsageError: cannot write stdout: No space left on device"
    )


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

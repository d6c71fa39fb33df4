from __future__ import annotations

import contextlib
import io
import sys
import time

import pytest

from fxmem.cli.shared.output import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_comes_after_the_delay_and_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.suppress(KeyError), show_progress("analysing a\x1b", delay_s=0.01):
        while not terminal.getvalue():
            time.sleep(0.01)
        raise KeyError  # an error clears the line too
    assert terminal.getvalue().startswith("\r\x1b[Kfxmem: analysing a\\x1b ... 0 s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress("analysing", delay_s=60):
        pass
    assert terminal.getvalue() == ""


def test_a_file_gets_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("analysing", delay_s=0):
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_lines_that_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with show_progress("running a.py", delay_s=0.01, details=lambda: ", step 2, 7 operators"):
        while not log.getvalue():
            time.sleep(0.01)
    assert log.getvalue().splitlines()[0] == "fxmem: running a.py ... 0 s, step 2, 7 operators"
    assert log.getvalue().endswith("operators\n")

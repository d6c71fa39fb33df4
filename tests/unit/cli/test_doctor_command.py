"""`fxmem doctor`, whose ten lines a bug report carries, and the page of private interfaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxmem.cli import main
from fxmem.versions import interfaces, release
from fxmem.versions.interfaces import Interface

PAGE = Path(__file__).parents[3] / "docs" / "private-interfaces.md"


def test_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = [line.split("  ")[0] for line in lines]
    assert topics == [
        "fxmem", "Python", "torch", "build", "GPU", "interfaces", "operators", "not in torch",
        "pictures", "libraries",
    ]  # fmt: skip
    assert lines[2].endswith(f"{torch.__version__}, supported (2.6 to 2.14)")


@pytest.mark.parametrize(
    ("installed", "judgement", "code"),
    [
        ((2, 5), "too old: fxmem needs 2.6 or later", 1),
        ((2, 15), "newer than 2.14, the newest that was tested", 0),
    ],
)
def test_releases_that_are_not_supported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: release.Release,
    judgement: str,
    code: int,
) -> None:
    monkeypatch.setattr(release, "INSTALLED", installed)
    monkeypatch.setattr(interfaces, "INTERFACES", ())
    assert main(["doctor"]) == code
    assert judgement in capsys.readouterr().out


def test_missing_interfaces_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Interface("torch._C", ("_gone", "_gone_too"), "test", "none")
    monkeypatch.setattr(interfaces, "INTERFACES", (gone,))
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "not supported: interfaces that fxmem relies on are missing" in told
    assert "missing: torch._C._gone and 1 more" in told
    assert "supported (2.6" not in told


def test_the_page_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--interfaces"]) == 0
    assert capsys.readouterr().out in PAGE.read_text(), "fxmem doctor --interfaces prints it"

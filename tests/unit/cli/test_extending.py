"""Doors for other packages: their plugins, and strategies named on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hand_made import make_analysis

import fxmem
from fxmem.cli import main
from fxmem.finding import FINDERS, TEXTS
from fxmem.plugins import load_plugins
from fxmem.report.formats import FORMATS

PLUGIN = """
import fxmem

def register():
    fxmem.register_format(".peak", lambda result: f"{result.peak_bytes}\\n")
    fxmem.register_finding("ACME1", lambda analysis: (), "Too large", "Write less.")

def fail():
    raise ValueError("no")
"""
NET = """
from torch import nn

def build():
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))

def propose(problem):
    calls = [call for call in problem.calls if call.fqn]
    yield [(calls[0].start, calls[7].stop)]
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package with two plugins, of which one fails."""
    (tmp_path / "acme_memory.py").write_text(PLUGIN)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    entries = "good = acme_memory:register\nbad = acme_memory:fail\n"
    (info / "entry_points.txt").write_text(f"[fxmem.plugins]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(FORMATS), mock.patch.dict(FINDERS), mock.patch.dict(TEXTS):
        load_plugins.cache_clear()
        yield
    load_plugins.cache_clear()


def test_plugins_are_loaded_by_the_first_command(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(fxmem.FxmemWarning, match="acme_memory:fail failed: ValueError: no"):
        assert main(["explain", "acme1"]) == 0
    assert capsys.readouterr().out == "ACME1: Too large\n\nWrite less.\n"
    fxmem.render(make_analysis(), tmp_path / "a.peak")
    assert (tmp_path / "a.peak").read_text() == f"{make_analysis().peak_bytes}\n"


def test_a_strategy_is_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.py"
    path.write_text(NET)
    step = [f"{path}:build", "--input", "4096x64", "--device", "cpu"]
    assert main(["plan", *step, "--strategy", f"{path}:propose"]) == 0
    out = capsys.readouterr().out
    assert "; 2 plans, down to " in out.splitlines()[0]
    options = ["--memory", "16MiB", "--max-overhead", "50%", "--strategy", f"{path}:propose"]
    assert main(["max-batch", *step, *options]) == 0
    assert " with a plan, for " in capsys.readouterr().out
    assert main(["plan", *step, "--strategy", "sarch"]) == 2
    assert "unknown strategy 'sarch'" in capsys.readouterr().err


def test_a_suffix_begins_with_a_dot() -> None:
    with pytest.raises(fxmem.UsageError, match=r"'tex' is not a suffix \(such as '.tex'\)"):
        fxmem.register_format("tex", str)

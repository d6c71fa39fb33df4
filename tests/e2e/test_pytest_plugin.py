"""The plugin for pytest, in a project that uses it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from torch import nn

import fxmem


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 256)

    def forward(self, x):
        return self.fc(x).tanh()


@pytest.mark.fxmem_budget("64 MiB")
def test_within(fxmem_analyze):
    assert isinstance(fxmem_analyze(Net(), "8x64", optimizer="adam"), fxmem.Analysis)


def test_without_a_budget(fxmem_analyze):
    assert fxmem_analyze(Net(), "8x64").peak_bytes > 2**20


@pytest.mark.fxmem_budget("1 MiB")
def test_over(fxmem_analyze):
    fxmem_analyze(Net(), "4096x64", device="cpu")


@pytest.mark.fxmem_budget("1 MiB")
def test_without_the_fixture():
    pass


@pytest.mark.fxmem_budget()
def test_without_a_size(fxmem_analyze):
    pass


@pytest.mark.fxmem_budget("much")
def test_of_no_size(fxmem_analyze):
    fxmem_analyze(Net(), "8x64")


def test_refused(fxmem_analyze):
    fxmem_analyze(Net(), "8x65")
"""


def test_a_peak_over_the_budget_fails_with_its_storages(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An installed fxmem would register it a second time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_memory=TESTS)
    options = ["-p", "_fxmem_pytest_plugin", "--strict-markers", "-W", "error"]
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=2, failed=3, errors=2)
    result.stdout.fnmatch_lines(
        [
            "fxmem_budget is for tests that use the fixture fxmem_analyze",
            "fxmem_budget takes one size: @pytest.mark.fxmem_budget('8 GiB')",
            "_* test_over _*",
            "Peak 9.13 MiB in backward of fc, test_memory.py:13, 8.13 MiB over the budget of *",
            "Net; 4096x64:float32; train; cpu; *",
            " *bytes  category * storage at the peak *",
            " 4.00 MiB  ACTIVATION  output *4096x256  float32  test_memory.py:13",
            "E * 'much' is not a size in bytes (*)",
            "E * the step failed at test_memory.py:13: *",
            "FAILED test_memory.py::test_over - Failed: Peak *",
        ]
    )
    result.stdout.no_fnmatch_line("*/fxmem/*")


def test_it_imports_nothing_that_is_not_used() -> None:
    code = "import sys, _fxmem_pytest_plugin; print({'fxmem', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "set()\n"

"""The command leaves torch.compile's machinery alone, and leaves it whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ANALYSE = f"""
import sys
from fxmem.cli import main
target = {str(ROOT / "examples" / "resnet.py")!r} + ":ResNet18"
assert main(["analyze", target, "--input", "2x3x64x64", *sys.argv[1:]]) == 0
"""
COMPILE = """
import torch, torch._dynamo
from torch._dynamo import config
config.verbose = True
compiled = torch.compile(lambda x: x * 2, backend="eager")
print(compiled(torch.ones(2)).tolist(), torch._dynamo.config is config, config.verbose)
print(type(torch._dynamo) is type(sys), sys.modules["torch._dynamo"] is torch._dynamo)
"""
SUBMODULE = """
from torch._dynamo.source import ConstantSource, LocalSource
import torch._dynamo.utils as utils
from torch._dynamo.utils import counters
print(utils.counters is counters, issubclass(LocalSource, object), ConstantSource.__module__)
"""


def run_python(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_analysis_does_not_import_it() -> None:
    assert run_python(ANALYSE + "print('torch._dynamo.symbolic_convert' in sys.modules)")[-1] == (
        "False"
    )


@pytest.mark.parametrize("arguments", [(), ("--optimizer", "adam")])
def test_it_works_afterwards(arguments: tuple[str, ...]) -> None:
    assert run_python(ANALYSE + COMPILE, *arguments)[-2:] == ["[2.0, 2.0] True True", "True True"]


def test_its_submodules_can_be_imported_first() -> None:
    assert run_python(ANALYSE + SUBMODULE)[-1] == "True True torch._dynamo.source"


def test_what_imported_it_before_keeps_it() -> None:
    program = "import torch._dynamo\n" + ANALYSE + "print(type(torch._dynamo) is type(sys))"
    assert run_python(program)[-1] == "True"

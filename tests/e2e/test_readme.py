"""The commands of the README do what it says, and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
SAMPLE = re.compile(r"<!-- output of: (?P<command>.*) -->\n```text\n(?P<output>.*?)```", re.DOTALL)


def list_commands(text: str) -> list[str]:
    """The fxmem commands in the bash blocks of a page, without what sets up."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.rpartition("&& ")[2].removeprefix(".venv/bin/") for line in lines]


RECORDED_ON = ("AVX512", 2)  # the CPU and the threads of the sample's workspace

PAGES = [README, ROOT / "docs" / "quickstart.md"]
COMMANDS = [
    command
    for page in PAGES
    for command in list_commands(page.read_text(encoding="utf-8"))
    if "examples/" in command
]


def run_fxmem(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    assert program == "fxmem"
    arguments = [arg.replace("examples/", f"{ROOT}/examples/") for arg in arguments]
    return subprocess.run(
        [sys.executable, "-m", "fxmem", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


@pytest.fixture
def fxmem_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("fxmem_importable")
@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_on_an_example_works(command: str, tmp_path: Path) -> None:
    done = run_fxmem(command, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    written = re.search(r"-o (\S+)", command)
    result = (tmp_path / written[1]).read_text() if written else done.stdout
    assert result.startswith("{" if "--json" in command else "Peak ")


@pytest.mark.usefixtures("fxmem_importable")
def test_the_output_shown_is_the_output_of_the_main_command(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sample = SAMPLE.search(TEXT)
    assert sample is not None
    assert sample["command"] == list_commands(TEXT)[0]
    output = run_fxmem(sample["command"], tmp_path, COLUMNS="120").stdout.replace(f"{ROOT}/", "")
    if request.config.getoption("--overwrite"):
        start, end = sample.span("output")
        README.write_text(TEXT[:start] + output + TEXT[end:], encoding="utf-8")
    elif (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()) == RECORDED_ON:
        assert sample["output"] == output
    else:  # another CPU's convolutions allocate other workspaces, and the peak may lie elsewhere
        assert re.match(r"Peak \d+\.\d+ MiB in \w+ of \S+, resnet\.py:\d+\n", output)
        headings = re.findall(r"^(?:over the step|at the peak|.*alive at the peak)", output, re.M)
        assert len(headings) == 3


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    lines = [line for line in TEXT.splitlines() if re.match(r"python3 -m venv .*pytest", line)]
    assert len(lines) == 1


@pytest.mark.usefixtures("fxmem_importable")
def test_the_python_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python_api.py")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["batch 64", "batch 512", "batch 4096"]

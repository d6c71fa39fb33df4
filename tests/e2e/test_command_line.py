"""The real command in a process of its own, on models in files."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxmem.cli import main

ROOT = Path(__file__).parents[2]
MODELS = """
import sys
import torch
from torch import nn

print("a greeting from the model's file")

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x, mask=None):
        y = torch.relu(self.fc(x))
        return y if mask is None else y * mask

class Raises(Net):
    def forward(self, x):
        return x.reshape(-1, 7)

class Branches(Net):
    def forward(self, x):
        return x if x.sum() > 0 else -x

class Counts(Net):
    def forward(self, x):
        return self.fc(x)[torch.nonzero(x[:, 0]).flatten()]

def leaves():
    sys.exit(3)

class Slow(Net):
    def forward(self, x):
        with open("running", "w"):  # returns once the test reads
            pass
        import signal
        while True:
            signal.pause()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "models.py").write_text(MODELS)
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Runs fxmem in a folder with models.py."""

    def run_fxmem(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fxmem", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    return run_fxmem


def test_a_step_from_a_file(run: Run) -> None:
    done = run("analyze", "models.py:Net(width=512)", "--input", "64x512", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "a greeting from the model's file\n"
    result = json.loads(done.stdout)
    assert result["parameter_bytes"] == result["gradient_bytes"] == 4 * (512 * 512 + 512)
    assert result["input_bytes"] == 4 * 64 * 512
    assert sum(result["breakdown"].values()) == result["peak_bytes"]
    lines = {node["source"]["line"] for node in result["nodes"] if node["source"]}
    source = MODELS.splitlines()
    assert any("torch.relu(self.fc(x))" in source[line - 1] for line in lines)


def test_the_report_is_for_a_gpu_unless_said_otherwise(run: Run) -> None:
    command = ("analyze", "models.py:Net", "--input", "64x256")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split("; ")[2:4] == ["train", "cuda"]
    assert "compare with" in done.stdout.split("\n\n")[1].splitlines()[0]
    rows = done.stdout.split("\n\n")[1].splitlines()[2:]
    assert [(row.split()[0], row.split("  ")[-1]) for row in rows] == [
        ("allocated", "torch.cuda.max_memory_allocated()"),
        ("reserved", "torch.cuda.max_memory_reserved()"),
        ("process", "nvidia-smi"),
    ]
    on_cpu = run(*command, "--device", "cpu").stdout
    assert on_cpu.splitlines()[1].split("; ")[2:4] == ["train", "cpu"]
    assert "compare with" not in on_cpu


def test_a_gpu_with_another_device_is_refused(run: Run) -> None:
    done = run("analyze", "models.py:Net", "--input", "64x256", "--device", "cpu", "--gpu", "t4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("fxmem: error: gpu='t4' with device='cpu' (leave one of them out)\n")


def test_a_keyword_input_and_infer(run: Run) -> None:
    arguments = ["--input", "64x256", "--input", "mask=64x256:bool", "--mode", "infer"]
    done = run("analyze", "models.py:Net", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["input_bytes"] == 64 * 256 * (4 + 1)
    assert result["gradient_bytes"] == result["saved_bytes"] == result["backward_flops"] == 0


def test_over_budget_is_exit_1_with_the_report(run: Run) -> None:
    done = run("analyze", "models.py:Net", "--input", "64x256", "--budget", "100KiB")
    assert done.returncode == 1
    assert done.stdout.startswith("Peak ")
    assert done.stderr.splitlines()[-1].startswith("fxmem: over budget: the peak of ")


def test_a_gpu_that_is_too_small_is_exit_1_with_the_report(run: Run) -> None:
    arguments = ("analyze", "models.py:Net", "--input", "9000000x256", "--mode", "infer")
    done = run(*arguments, "--gpu", "rtx3070")
    assert done.returncode == 1
    assert "Does not fit NVIDIA GeForce RTX 3070" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fxmem: the step does not fit NVIDIA GeForce RTX 3070: out of memory: ")
    assert run(*arguments, "--gpu", "h200").returncode == 0


def test_a_file_is_written_whole(run: Run, tmp_path: Path) -> None:
    done = run("analyze", "models.py:Net", "--input", "64x256", "--json", "-o", "out.json")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["peak_bytes"] > 0


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("missing.py:Net", ["missing.py"]),
        ("missing_module:Net", ["missing_module"]),
        ("models.py:Missing", ["Missing"]),
        ("models.py", ["models.py"]),
        ("models.py:Raises", ["models.py:19", "invalid for input of size 16384"]),
        ("models.py:Branches", ["models.py:23", "`x.sum() > 0`"]),
        ("models.py:Counts", ["models.py:27", "`torch.nonzero(x[:, 0])`", "size hint"]),
        ("models.py:leaves", ["exit"]),
    ],
)
def test_what_cannot_be_analysed_is_one_line_with_the_users_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", target, "--input", "64x256"]) == 2
    out, err = capsys.readouterr()
    *before, line = err.splitlines()
    assert out == ""
    assert set(before) <= {"a greeting from the model's file"}
    assert line.startswith("fxmem: error: ")
    assert "internal error" not in line
    assert [word for word in words if word not in line] == []


def test_a_size_hint_stands_for_a_size_that_depends_on_values(run: Run) -> None:
    done = run("analyze", "models.py:Counts", "--input", "64x256", "--size-hint", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] > 0


def test_debug_shows_the_users_frames(run: Run) -> None:
    done = run("analyze", "models.py:Raises", "--input", "64x256", "--debug")
    assert done.returncode == 2
    assert "return x.reshape(-1, 7)" in done.stderr


def test_head_is_quiet(tmp_path: Path, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m fxmem analyze models.py:Net --input 64x256 --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, "{\n")
    assert done.stderr == "a greeting from the model's file\n"


def run_in_shell(
    command: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


ANALYZE = f"{sys.executable} -m fxmem analyze models.py:Net --input 64x256"


def test_a_closed_stdout_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_in_shell(f"{ANALYZE} >&-", tmp_path, environment)
    assert done.returncode == 2
    assert done.stderr == "fxmem: error: stdout is closed (write to a file with -o FILE)\n"
    done = run_in_shell(f"{ANALYZE} -o out.txt >&-", tmp_path, environment)
    assert done.returncode == 0
    assert (tmp_path / "out.txt").read_text().startswith("Peak ")


@pytest.mark.parametrize("options", ["", "--budget 1KiB", "--input 3x4"])
def test_a_closed_stderr_changes_nothing_else(
    tmp_path: Path, environment: dict[str, str], options: str
) -> None:
    done = run_in_shell(f"{ANALYZE} {options} 2>&-", tmp_path, environment)
    quiet = run_in_shell(f"{ANALYZE} {options} 2> /dev/null", tmp_path, environment)
    assert (done.returncode, done.stdout) == (quiet.returncode, quiet.stdout)


def test_a_full_disk_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_in_shell(f"{ANALYZE} > /dev/full", tmp_path, environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "fxmem: error: cannot write stdout: No space left on device"
    )


@pytest.mark.parametrize("options", ["--mode infer --json", "--optimizer adam --loss mse --nodes"])
def test_numpy_is_not_needed(tmp_path: Path, environment: dict[str, str], options: str) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "numpy.py").write_text("raise ModuleNotFoundError('numpy')")
    hidden = {**environment, "PYTHONPATH": f"{tmp_path / 'hidden'}:{environment['PYTHONPATH']}"}
    done = run_in_shell(f"{ANALYZE} {options}", tmp_path, hidden)
    assert (done.returncode, done.stderr) == (0, "a greeting from the model's file\n")


def test_a_file_does_not_see_the_arguments_of_the_command(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "reads.py").write_text(
        "import argparse, sys\n"
        "import models\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, default=16)\n"
        "width = parser.parse_args().width\n"
        "assert sys.argv == ['reads.py']\n"
        "def build():\n"
        "    return models.Net(width)\n"
    )
    done = run_in_shell(
        f"{sys.executable} -m fxmem analyze reads.py:build --input 4x16", tmp_path, environment
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_is_quiet_and_the_progress_line_goes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    os.mkfifo(tmp_path / "running")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fxmem", "analyze", "models.py:Slow", "--input", "64x256"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env=environment,
    )
    os.close(theirs)
    with open(tmp_path / "running"):  # returns once the model's forward runs
        pass
    shown = b""
    while b"analysing models.py:Slow ..." not in shown:
        shown += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    assert process.wait() == 130
    process.stdout.close()
    with contextlib.suppress(OSError):  # the terminal has no other end any more
        while data := os.read(ours, 1000):
            shown += data
    os.close(ours)
    assert shown.endswith(b"\r\x1b[K")
    assert b"Traceback" not in shown

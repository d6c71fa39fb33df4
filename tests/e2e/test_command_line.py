"""Commands on models in files; in a process of their own where pipes and signals matter."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxmem.cli import main

ROOT = Path(__file__).parents[2]
GREETING = "a greeting from the model's file\n"
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

def build_from_arguments():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    width = parser.parse_args().width
    assert sys.argv == ["models.py"]
    return Net(width)

class Slow(Net):
    def forward(self, x):
        with open("running", "w"):  # returns once the test reads
            pass
        import signal
        while True:
            signal.pause()
"""
ANALYZE = f"{sys.executable} -m fxmem analyze models.py:Net --input 64x256"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models.py, which is the current one."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def analyze(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["analyze", *arguments])
    return code, *capsys.readouterr()


def run_in_shell(command: str) -> subprocess.CompletedProcess[str]:
    shell = ["bash", "-c", f"set -o pipefail; {command}"]
    return subprocess.run(shell, capture_output=True, text=True)


def test_a_step_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = analyze(capsys, "models.py:Net", "--input", "64x256", "--json")
    assert (code, err) == (0, GREETING)
    result = json.loads(out)
    assert result["parameter_bytes"] == result["gradient_bytes"] == 4 * (256 * 256 + 256)
    assert result["input_bytes"] == 4 * 64 * 256
    assert sum(result["breakdown"].values()) == result["peak_bytes"]
    lines = {node["source"]["line"] for node in result["nodes"] if node["source"]}
    assert any("torch.relu(self.fc(x))" in MODELS.splitlines()[line - 1] for line in lines)


def test_a_keyword_input_and_infer(capsys: pytest.CaptureFixture[str]) -> None:
    step = ("models.py:Net", "--input", "64x256", "--input", "mask=64x256:bool", "--mode", "infer")
    assert analyze(capsys, *step, "--json", "-o", "out.json")[:2] == (0, "")
    result = json.loads(Path("out.json").read_text())
    assert result["input_bytes"] == 64 * 256 * (4 + 1)
    assert result["gradient_bytes"] == result["saved_bytes"] == result["backward_flops"] == 0


def test_a_gpu_that_is_too_small_is_exit_1_with_the_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = ("models.py:Net", "--input", "9000000x256", "--mode", "infer")
    code, out, err = analyze(capsys, *step, "--gpu", "rtx3070")
    assert code == 1
    assert "Does not fit NVIDIA GeForce RTX 3070" in out
    assert "compare with" in out.split("\n\n")[1].splitlines()[0]
    last = err.splitlines()[-1]
    assert last.startswith("fxmem: the step does not fit NVIDIA GeForce RTX 3070: out of memory: ")
    assert analyze(capsys, *step, "--gpu", "h200")[0] == 0
    assert "compare with" not in analyze(capsys, *step, "--device", "cpu")[1]


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
    capsys: pytest.CaptureFixture[str], target: str, words: list[str]
) -> None:
    code, out, err = analyze(capsys, target, "--input", "64x256")
    *before, line = err.splitlines(keepends=True)
    assert (code, out) == (2, "")
    assert set(before) <= {GREETING}
    assert line.startswith("fxmem: error: ")
    assert "internal error" not in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    "step",
    [
        ("models.py:Counts", "--size-hint", "5"),  # for the size that depends on values
        ("models.py:build_from_arguments",),  # which sees none of the command's
    ],
)
def test_steps_that_work(capsys: pytest.CaptureFixture[str], step: tuple[str, ...]) -> None:
    assert analyze(capsys, *step, "--input", "64x256")[0] == 0


def test_debug_shows_the_users_frames(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = analyze(capsys, "models.py:Raises", "--input", "64x256", "--debug")
    assert code == 2
    assert "return x.reshape(-1, 7)" in err


FULL = f"{GREETING}fxmem: error: cannot write stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("ends", "code", "out", "err"),
    [
        ("--json | head -n 1", 0, "{\n", GREETING),
        (">&-", 2, "", "fxmem: error: stdout is closed (write to a file with -o FILE)\n"),
        ("> /dev/full", 2, "", FULL),
        ("--budget 1KiB 2>&- | head -c 5", 1, "Peak ", ""),
    ],
)
def test_streams_that_end_early(ends: str, code: int, out: str, err: str) -> None:
    done = run_in_shell(f"{ANALYZE} {ends}")
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_numpy_is_not_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hidden").mkdir()
    (folder / "hidden" / "numpy.py").write_text("raise ModuleNotFoundError('numpy')")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'hidden'}:{ROOT}")
    done = run_in_shell(f"{ANALYZE} --optimizer adam --loss mse --nodes")
    assert (done.returncode, done.stderr) == (0, GREETING)


def test_an_interrupt_is_quiet_and_the_progress_line_goes(folder: Path) -> None:
    os.mkfifo(folder / "running")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fxmem", "analyze", "models.py:Slow", "--input", "64x256"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background
    )
    os.close(theirs)
    with open(folder / "running"):  # returns once the model's forward runs
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

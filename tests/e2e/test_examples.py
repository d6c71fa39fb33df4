"""Examples; those that train compare their curves with and without a plan, bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from pages import ROOT

RUN = """
import runpy, sys
from benchmarks.cases import import_torchvision
if sys.argv[2:]:
    import_torchvision()  # trainers look for it
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_example(name: str, *needs: str) -> subprocess.CompletedProcess[str]:
    """Runs an example, which ends well; returns what it prints."""
    missing = [library for library in needs if find_spec(library) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "examples" / name), *needs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_api_analyses_batches_of_three_sizes() -> None:
    done = run_example("python_api.py")
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert [line.split(":")[0] for line in lines[:3]] == ["batch 64", "batch 512", "batch 4096"]


def test_more_checkpoints_of_a_llama_take_less_memory() -> None:
    done = run_example("llama.py")
    rows = re.findall(r"^checkpoints (\w+): ([\d.]+) MiB$", done.stdout, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["None", "2", "op", "full"]
    peaks = [float(peak) for _, peak in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert done.stderr == ""


def test_the_curve_is_the_same_in_less_than_half_of_the_memory() -> None:
    out = run_example("train_characters.py").stdout
    rows = re.findall(r"^ +\d+  (\S+)  (\S+)$", out, flags=re.MULTILINE)
    assert len(rows) == 7
    assert all(ours == theirs for ours, theirs in rows)
    assert float(rows[-1][0]) < float(rows[0][0]) - 1
    assert "the same in all 60 steps" in out
    ratio = re.search(r"activations .* -> .*: (\S+)x less", out)
    assert ratio and float(ratio[1]) >= 2


def test_a_callback_plans_what_lightning_trains() -> None:
    out = run_example("lightning_callback.py", "lightning").stdout
    assert re.search(r"^\d+ steps, loss 0\.\d+ -> 0\.\d+: the same$", out, flags=re.MULTILINE)


def test_a_callback_plans_what_the_trainer_of_transformers_trains() -> None:
    out = run_example("hugging_face_trainer.py", "transformers", "accelerate").stdout
    assert re.search(r"^\d+ steps, loss \S+ -> \S+: the same$", out, flags=re.MULTILINE)

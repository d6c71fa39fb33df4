"""Examples; those that train compare their curves with and without a plan, bit for bit."""

from __future__ import annotations

import re
import runpy
import warnings
from importlib.util import find_spec

import pytest
from pages import ROOT

from benchmarks.cases import import_torchvision

Output = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("quick_search")


def run_example(name: str, capsys: Output, *needs: str) -> tuple[str, str]:
    """Runs an example; returns what it prints, and what it warns of on stderr."""
    missing = [library for library in needs if find_spec(library) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    with warnings.catch_warnings():
        if needs:
            import_torchvision()  # trainers look for it
            warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out, err = capsys.readouterr()
    return out, err


def test_the_api_analyses_batches_of_three_sizes(capsys: Output) -> None:
    out, err = run_example("python_api.py", capsys)
    lines = out.splitlines()
    assert err == ""
    assert [line.split(":")[0] for line in lines[:3]] == ["batch 64", "batch 512", "batch 4096"]


def test_more_checkpoints_of_a_llama_take_less_memory(capsys: Output) -> None:
    out, err = run_example("llama.py", capsys)
    rows = re.findall(r"^checkpoints (\w+): ([\d.]+) MiB$", out, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["None", "2", "op", "full"]
    peaks = [float(peak) for _, peak in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert err == ""


def test_the_curve_is_the_same_in_less_than_half_of_the_memory(capsys: Output) -> None:
    out, _ = run_example("train_characters.py", capsys)
    rows = re.findall(r"^ +\d+  (\S+)  (\S+)$", out, flags=re.MULTILINE)
    assert len(rows) == 7
    assert all(ours == theirs for ours, theirs in rows)
    assert float(rows[-1][0]) < float(rows[0][0]) - 1
    assert "the same in all 60 steps" in out
    ratio = re.search(r"activations .* -> .*: (\S+)x less", out)
    assert ratio and float(ratio[1]) >= 2


def test_a_callback_plans_what_lightning_trains(capsys: Output) -> None:
    out, _ = run_example("lightning_callback.py", capsys, "lightning")
    assert re.search(r"^\d+ steps, loss 0\.\d+ -> 0\.\d+: the same$", out, flags=re.MULTILINE)


def test_a_callback_plans_what_the_trainer_of_transformers_trains(capsys: Output) -> None:
    out, _ = run_example("hugging_face_trainer.py", capsys, "transformers", "accelerate")
    assert re.search(r"^\d+ steps, loss \S+ -> \S+: the same$", out, flags=re.MULTILINE)

"""``fxmem plan`` in a process of its own, and what its plan and suggested code do to the model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from suggested_code import write_suggestions

import fxmem
from fxmem.planning.dels.deletion import apply_deletions
from fxmem.planning.inplace.overwriting import apply_inplace
from fxmem.planning.outcome import measure_graph
from fxmem.report.suggestions import suggest_code

ROOT = Path(__file__).parents[2]
NETS = """
import torch
from torch import nn

class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expand = nn.Linear(width, 8 * width)
        self.contract = nn.Linear(8 * width, width)

    def forward(self, x):
        return self.contract(torch.sigmoid(self.expand(x)))

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = Feed(width)
        self.rest = nn.ModuleList(Feed(width) for _ in range(2))
        self.last = Feed(width)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for feed in self.rest:
            x = torch.relu(feed(x))
        return self.last(x)
"""
COMPARE = """
import importlib.util, torch
results = []
for name in "before", "nets":
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    net, x = module.Net(), torch.randn(32, 64, requires_grad=True)
    output = net(x)
    output.sum().backward()
    results.append([output, x.grad, *(p.grad for p in net.parameters())])
assert all(a.equal(b) for a, b in zip(*results, strict=True))
"""
COMMAND = ("plan", "nets.py:Net", "--input", "4096x64")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs fxmem in a folder with nets.py."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)

    def run_fxmem(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fxmem", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return run_fxmem


def test_the_table_and_a_plan_for_one_of_its_rows(run: Run) -> None:
    done = run(*COMMAND)
    assert (done.returncode, done.stderr) == (0, "")
    head, table, advice = done.stdout.split("\n\n")
    assert head.startswith("Peak 71.51 MiB; ")
    peaks = [line.partition(" MiB")[0].strip() for line in table.splitlines()[2:]]
    assert float(peaks[-1]) < 0.7 * 71.51
    assert "--max-overhead" in advice
    done = run(*COMMAND, "--budget", f"{peaks[-1]}MiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Peak 71.51 MiB -> ")
    assert "\nThe new peak is in " in done.stdout


def test_a_plan_from_a_file_gives_the_peak_that_it_says(run: Run) -> None:
    done = run(*COMMAND, "--max-overhead", "20%", "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = fxmem.Plan.from_json(Path("plan.json").read_text())
    assert plan.overhead <= 0.2
    spec = importlib.util.spec_from_file_location("planned_nets", "nets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = fxmem.analyze(module.Net(), ("4096x64",))
    assert plan.baseline_peak_bytes == before.peak_bytes
    planned = fxmem.apply(module.Net(), plan, ("4096x64",))
    assert fxmem.analyze(planned, ("4096x64",)).peak_bytes == plan.peak_bytes


def write_code(plan: fxmem.Plan, analysis: fxmem.Analysis) -> None:
    """Writes a plan's suggestions into nets.py, and the code as it was into before.py."""
    suggestions = suggest_code(plan, analysis.nodes, {str(Path("nets.py").resolve()): NETS})
    Path("before.py").write_text(NETS)
    Path("nets.py").write_text(write_suggestions(NETS, suggestions))


def test_suggested_checkpoints_lower_the_peak_and_change_no_result(run: Run) -> None:
    before = fxmem.analyze("nets.py:Net", ("4096x64",))
    done = run(*COMMAND, "--max-overhead", "0.2", "--style", "modules", "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    line = "x = torch.relu(torch.utils.checkpoint.checkpoint(feed, x, use_reentrant=False))"
    assert f"\n  nets.py:24  {line}" in done.stdout
    write_code(fxmem.Plan.from_json(Path("plan.json").read_text()), before)
    assert line in Path("nets.py").read_text()
    after = json.loads(run("analyze", *COMMAND[1:4], "--json").stdout)
    assert after["peak_bytes"] < 0.8 * before.peak_bytes
    subprocess.run([sys.executable, "-c", COMPARE], check=True)


def test_in_inference_suggestions_give_the_peak_of_their_changes(run: Run) -> None:
    command = (*COMMAND[1:4], "--mode", "infer")
    analysis = fxmem.analyze("nets.py:Net", ("4096x64",), mode="infer")
    plan = fxmem.Plan.from_json(run("plan", *command, "--json").stdout)
    assert plan.segments == ()
    assert plan.peak_bytes < plan.baseline_peak_bytes
    write_code(plan, analysis)
    after = json.loads(run("analyze", *command, "--json").stdout)
    changed = apply_deletions(apply_inplace(analysis.graph, plan.inplace), plan.dels)
    assert after["peak_bytes"] == measure_graph(analysis, changed)[0] < plan.baseline_peak_bytes
    # What the caller of a module holds while it runs has no variable: only the graph lets it go.
    assert plan.peak_bytes < after["peak_bytes"]
    subprocess.run([sys.executable, "-c", COMPARE], check=True)


def test_advice_has_the_peak_of_the_step_that_does_it(run: Run) -> None:
    done = run("plan", *COMMAND[1:4], "--advice")
    assert (done.returncode, done.stderr) == (0, "")
    head, _, *advice = done.stdout.split("\n\n")
    assert head.startswith("Peak 71.51 MiB\nnets.py:Net; ")
    (autocast,) = (text for text in advice if 'Write: autocast="bf16"' in text)
    after = run("analyze", *COMMAND[1:4], "--autocast", "bf16").stdout
    assert f", {after.split(' in ')[0].removeprefix('Peak ')} left: Run forward" in autocast


def test_no_plan_is_exit_1_and_one_line(run: Run) -> None:
    done = run(*COMMAND, "--budget", "20MiB", "-o", "plan.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fxmem: error: no plan within 20.00 MiB exists; the leanest ")
    assert done.stderr.count("\n") == 1
    assert not Path("plan.json").exists()


def test_a_gpu_that_is_too_small_for_any_plan_is_exit_1(run: Run) -> None:
    command = ("plan", "nets.py:Net", "--input", "9000000x64")
    done = run(*command, "--gpu", "rtx3070", "--fit")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "fxmem: error: no plan was found whose step fits NVIDIA GeForce RTX 3070; "
    )


def test_what_is_no_training_step_is_exit_2(run: Run) -> None:
    done = run("plan", "nets.py:Nothing", "--input", "4096x64")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fxmem: error: ")

"""``fxmem plan`` on a model in a file: its plans, and the code that it suggests, do as they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from steps import are_equal, take_step
from suggested_code import load_net, write_suggestions

import fxmem
from fxmem.cli import main
from fxmem.planning.deletion import apply_deletions
from fxmem.planning.inplace.inplace_changes import apply_inplace
from fxmem.planning.outcome import measure_graph
from fxmem.planning.suggestions import suggest_code

pytestmark = pytest.mark.usefixtures("quick_search")

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
COMMAND = ("plan", "nets.py:Net", "--input", "4096x64")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs fxmem in a folder with nets.py; returns the exit code, stdout and stderr."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run_fxmem(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        return code, *capsys.readouterr()

    return run_fxmem


def test_a_plan_for_a_row_of_the_table_gives_the_peak_that_it_says(run: Run) -> None:
    code, out, err = run(*COMMAND)
    assert (code, err) == (0, "")
    head, table, advice = out.split("\n\n")
    assert head.startswith("Peak 71.51 MiB; ")
    peaks = [line.partition(" MiB")[0].strip() for line in table.splitlines()[2:]]
    assert float(peaks[-1]) < 0.7 * 71.51
    assert "--max-overhead" in advice
    code, out, _ = run(*COMMAND, "--budget", f"{peaks[-1]}MiB", "-o", "plan.json")
    assert code == 0
    assert out.startswith("Peak 71.51 MiB -> ") and "\nThe new peak is in " in out
    plan = fxmem.Plan.from_json(Path("plan.json").read_text())
    planned = fxmem.apply(load_net("nets.py"), plan, ("4096x64",))
    assert fxmem.analyze(planned, ("4096x64",)).peak_bytes == plan.peak_bytes


def compare_results() -> None:
    """Checks that nets.py and changed.py compute the same."""
    x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
    assert are_equal(*(take_step(load_net(name), (x,)) for name in ("nets.py", "changed.py")))


def write_code(plan: fxmem.Plan, analysis: fxmem.Analysis) -> None:
    """Writes the code with a plan's suggestions into a new file."""
    suggestions = suggest_code(plan, analysis.nodes, {str(Path("nets.py").resolve()): NETS})
    Path("changed.py").write_text(write_suggestions(NETS, suggestions))


def test_suggested_checkpoints_lower_the_peak_and_change_no_result(run: Run) -> None:
    before = fxmem.analyze("nets.py:Net", ("4096x64",))
    options = ("--max-overhead-flops", "20%", "--style", "modules", "-o", "plan.json")
    code, out, err = run(*COMMAND, *options)
    assert (code, err) == (0, "")
    line = "x = torch.relu(torch.utils.checkpoint.checkpoint(feed, x, use_reentrant=False))"
    assert f"\n  nets.py:24  {line}" in out
    plan = fxmem.Plan.from_json(Path("plan.json").read_text())
    assert plan.overhead_flops <= 0.2
    write_code(plan, before)
    assert line in Path("changed.py").read_text()
    assert fxmem.analyze("changed.py:Net", ("4096x64",)).peak_bytes < 0.8 * before.peak_bytes
    compare_results()


def test_in_inference_suggestions_give_the_peak_of_their_changes(run: Run) -> None:
    analysis = fxmem.analyze("nets.py:Net", ("4096x64",), mode="infer")
    plan = fxmem.Plan.from_json(run(*COMMAND, "--mode", "infer", "--json")[1])
    assert plan.segments == ()
    assert plan.peak_bytes < plan.baseline_peak_bytes
    write_code(plan, analysis)
    after = fxmem.analyze("changed.py:Net", ("4096x64",), mode="infer").peak_bytes
    changed = apply_deletions(apply_inplace(analysis.graph, plan.inplace), plan.dels)
    assert after == measure_graph(analysis, changed)[0] < plan.baseline_peak_bytes
    # What the caller of a module holds while it runs has no variable: only the graph lets it go.
    assert plan.peak_bytes < after
    compare_results()


def test_advice_has_the_peak_of_the_step_that_does_it(run: Run) -> None:
    code, out, err = run(*COMMAND, "--advice")
    assert (code, err) == (0, "")
    head, _, *advice = out.split("\n\n")
    assert head.startswith("Peak 71.51 MiB\nnets.py:Net; ")
    (autocast,) = (text for text in advice if 'Write: autocast="bf16"' in text)
    after = run("analyze", *COMMAND[1:], "--autocast", "bf16")[1]
    assert f", {after.split(' in ')[0].removeprefix('Peak ')} left: Run forward" in autocast

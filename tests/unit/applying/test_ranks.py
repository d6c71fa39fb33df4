"""Plans for one rank of many processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.applying.plan_search import (
    RankPlans,
    choose_plan,
    list_ways,
    record_front,
    seek_rank_plans,
)
from fxmem.cli import main
from fxmem.errors import InfeasibleError, UsageError
from fxmem.parallelism.checkpointing import checkpoint_blocks
from fxmem.parallelism.wrapping import shard_blocks
from fxmem.planning.plan_blocks import list_way_blocks
from fxmem.planning.planner import find_front
from fxmem.planning.strategies.problem import Goal
from fxmem.report.blocks import render_text

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"),
        reason="fully_shard needs a GPU in this release",
    ),
    pytest.mark.usefixtures("quick_search"),
]
WIDTH = 32
STEP: dict[str, Any] = {"mesh": {"dp": 8}, "device": "cpu", "loss": "mse", "optimizer": "adam"}
BATCH = f"256x{WIDTH}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_net() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def analyze(model: nn.Module, **options: Any) -> fxmem.Analysis:
    return fxmem.analyze(model, BATCH, **{"parallelize": "fsdp", **STEP, **options})


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_net()


@pytest.fixture(scope="module")
def analysis(model: nn.Module) -> fxmem.Analysis:
    return analyze(model)


@pytest.fixture(scope="module")
def plans(analysis: fxmem.Analysis) -> RankPlans:
    return seek_rank_plans(analysis, points=3)


def test_a_plan_promises_what_the_applied_model_takes(
    model: nn.Module, analysis: fxmem.Analysis
) -> None:
    budget = int(0.7 * analysis.peak_bytes)
    plan = fxmem.plan(analysis, budget=budget)
    assert plan.peak_bytes <= budget < plan.baseline_peak_bytes == analysis.peak_bytes
    assert analyze(fxmem.apply(model, plan)).peak_bytes == plan.peak_bytes
    assert 0 < plan.overhead_flops < 0.4
    assert str(plan).startswith("Peak ")
    assert "Peak " in plan._repr_html_()
    assert "The new peak is in backward" in str(plan)
    assert fxmem.Plan.from_json(plan.to_json()) == plan


def test_the_optimizer_of_one_process_hides_no_plan() -> None:
    # In one process the peak lies in the optimizer step, which no recomputation lowers.
    fixed: dict[str, Any] = {**STEP, "mesh": None, "parallelize": None}
    model = make_net()
    assert len(fxmem.pareto(fxmem.analyze(model, f"16x{WIDTH}", **fixed), style="modules")) == 1
    shared = fxmem.analyze(model, f"16x{WIDTH}", **{**STEP, "parallelize": "fsdp"})
    assert min(plan.peak_bytes for plan in fxmem.pareto(shared, points=2)) < shared.peak_bytes


def test_ways_to_recompute(analysis: fxmem.Analysis, plans: RankPlans) -> None:
    front = record_front(plans)
    assert [plan.peak_bytes for plan in front] == sorted(p.peak_bytes for p in front)[::-1]
    assert not front[0].segments
    ways = dict(list_ways(plans))
    assert {"nothing", "every block", "every 2nd block", "by operator"} <= ways.keys()
    every, second = ways["every block"], ways["every 2nd block"]
    assert [segment.fqn for segment in second.segments] == ["1", "3"]  # type: ignore[union-attr]
    assert every.peak_bytes < second.peak_bytes < analysis.peak_bytes
    assert every.overhead_flops > ways["by operator"].overhead_flops
    text = render_text(
        list_way_blocks([*ways.items()], None, chosen=front[-1], budget_bytes=second.peak_bytes)
    )
    assert text.count("chosen") == 1
    assert " no" in text


def test_limits(plans: RankPlans) -> None:
    leanest = min(record_front(plans), key=lambda plan: plan.peak_bytes)
    by_flops = choose_plan(plans, Goal(overhead=leanest.overhead_flops, by_flops=True))
    assert by_flops.peak_bytes == leanest.peak_bytes
    assert choose_plan(plans, Goal(overhead=0)).segments == ()
    assert choose_plan(plans, Goal(leanest.peak_bytes)) == leanest
    with pytest.raises(InfeasibleError, match=r"no plan within 1.00 KiB was found; the leanest"):
        choose_plan(plans, Goal(1024))


def test_refusals(analysis: fxmem.Analysis, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="style 'graph' rewrites a graph, and a rank's step has"):
        fxmem.plan(analysis, budget=1024, style="graph")

    def parallelize(model: Any, mesh: Any) -> nn.Module:
        checkpoint_blocks(model, "full")
        return shard_blocks(model, mesh)

    with pytest.raises(UsageError, match="parallelize checkpoints modules, and a plan would"):
        fxmem.pareto(analyze(make_net(), parallelize=parallelize))
    with pytest.raises(UsageError, match="is found by recording the rank"):
        find_front(analysis, by_flops=False, points=20)
    plan = fxmem.Plan("", 2, 1)
    with pytest.raises(UsageError, match="plans are not drawn on the step of a rank"):
        fxmem.render(analysis, tmp_path / "x.dot", plan=plan)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    step = [f"{__file__}:make_net", f"--input={BATCH}", "--fsdp=8", "--loss=mse"]
    assert main(["plan", *step, "--fit", "--gpu", "h100"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "rank 0 of dp=8 by fsdp" in out
    assert "\nevery 2nd block " in out
    assert ", nothing is recomputed\n" in out

"""Pipelines: the order of actions, what is refused, and what a report says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import fxmem
from fxmem.graph import Category
from fxmem.pipelines import pipelining
from fxmem.pipelines.orders import list_actions


class Counting(nn.Module):
    """Keeps the tensor of its last call."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return x + 1


class Returning(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x}


def run(stages: Any = None, inputs: Any = "8x4", **options: Any) -> fxmem.Pipeline:
    if stages is None:
        stages = [nn.Linear(4, 4) for _ in range(4)]
    settings = {"microbatches": 4, "device": "cpu", **options}
    return fxmem.pipeline(stages, inputs, **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": nn.Linear(2, 2)}, "stages must be a list of two modules or more, got Linear"),
        ({"inputs": "6x4"}, "an input of 6x4 does not split into 4 micro-batches"),
        ({"microbatches": 0}, "microbatches must be 1 or more, got 0"),
        ({"ranks": 0}, "ranks must be 1 or more, got 0"),
        ({"schedule": "2F2B"}, "Unknown schedule name '2F2B'."),
        ({"ranks": 2}, "1F1B takes one stage a rank, got 4 stages on 2 ranks"),
        ({"microbatches": 2}, "1F1B takes at least as many micro-batches as stages, got 2"),
        (
            {"schedule": "Interleaved1F1B", "ranks": 3},
            "Interleaved1F1B takes the same number of stages, two or more, on each rank",
        ),
        (
            {"schedule": "ZBVZeroBubble", "ranks": 1},
            "ZBVZeroBubble does not take 4 stages on 1 ranks: ZBV requires exactly 2 stages",
        ),
        ({"stages": [Returning(), nn.Linear(4, 4)]}, "stage 0 returns dict, which cannot be sent"),
        (
            {"stages": [Counting(), nn.Linear(4, 4)]},
            "for its second micro-batch, stage 0 frees 'kept', which it made for another",
        ),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.FxmemError) as caught:
        run(**options)
    assert message in str(caught.value)


def test_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which reduce gradients within the last backward, and always return outputs."""
    monkeypatch.setattr(pipelining, "is_release", lambda since: False)
    with pytest.raises(fxmem.UsageError, match="return_outputs=False need torch"):
        run(return_outputs=False)


def test_1f1b_is_in_the_order_of_pytorch() -> None:
    """Whose own list, for pictures, counts the forwards of the last rank from 1."""
    order = list_actions("1F1B", 4, 6, None)[1]
    stage = type("Stage", (), {"num_stages": 4})()
    own = schedules.Schedule1F1B(stage, 6).pipeline_order
    assert own is not None
    for rank in range(3):
        kinds = [action for action in own[rank] if action and action.microbatch_index is not None]
        assert [(a.computation_type.value, a.microbatch_index) for a in kinds] == [
            (a.work.value, a.microbatch) for a in order[rank]
        ]


def shard(stage: nn.Module, mesh: Any, **settings: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(stage, mesh=mesh, **{"reshard_after_forward": False, **settings})


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this release"
)
def test_sharded_stages() -> None:
    """Parameters are gathered once a step, gradients added up whole and reduced at its end."""
    mesh = {"mesh": {"dp": 2}, "optimizer": "adam"}
    stages = [nn.Linear(400, 400, bias=False) for _ in range(2)]
    nbytes = 400 * 400 * 4
    found = run(stages, "8x400", parallelize=shard, **mesh)
    assert found.setup.parallelize == "shard"
    for rank in found.ranks:
        assert rank.breakdown[Category.PARAMETER] == nbytes // 2 + nbytes
        assert rank.breakdown[Category.OPTIMIZER_STATE] == nbytes + 4  # two halves, and a step
    whole = found.ranks[0].breakdown
    assert nbytes <= whole[Category.GRADIENT] < nbytes + 400 * 4 * 8 * 2
    with pytest.raises(fxmem.TraceError, match="under fully_shard, with reshard_after_forward"):
        run(
            stages,
            "8x400",
            parallelize=lambda s, m: shard(s, m, reshard_after_forward=True),
            **mesh,
        )
    with pytest.raises(fxmem.TraceError, match="under DistributedDataParallel are not supported"):
        run(stages, "8x400", parallelize="ddp", **mesh)


def test_results() -> None:
    stages = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    found = run(stages, schedule="interleaved1f1b")
    assert [[stage.index for stage in rank.stages] for rank in found.ranks] == [[0, 2], [1, 3]]
    for rank in found.ranks:
        assert sum(rank.breakdown.values()) == rank.peak_bytes == rank.reserved_bytes
    values = json.loads(found.to_json())
    assert values["ranks"][1]["action"] == {"work": "B", "stage": 1, "microbatch": 3}
    gpu = run(stages, device="cuda", gpu="t4")
    assert [rank.fits for rank in gpu.ranks] == [True] * 4
    assert "T4" in str(gpu)

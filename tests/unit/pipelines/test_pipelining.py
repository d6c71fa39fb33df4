"""Pipelines: what is refused, the analysis of each rank, and what a report says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.graph import Category
from fxmem.pipelines import pipelining
from fxmem.pipelines.pipeline import StageAction, Work


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
        ({"microbatches": 2}, "1F1B does not take 2 micro-batches of 4 stages on 4 ranks"),
        (
            {"schedule": "Interleaved1F1B", "ranks": 3},
            "Interleaved1F1B takes the same number of stages, two or more, on each rank",
        ),
        (
            {"schedule": "ZBVZeroBubble", "ranks": 1},
            "ZBVZeroBubble does not take 4 micro-batches of 4 stages on 1 ranks: ZBV requires",
        ),
        ({"stages": [Returning(), nn.Linear(4, 4)]}, "stage 0 returns dict, which cannot be sent"),
        (
            {"mesh": {"pp": 2}, "parallelize": "ddp"},
            "pp is the pipeline's own dimension of the mesh",
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
    again = run(
        stages, "8x400", parallelize=lambda s, m: shard(s, m, reshard_after_forward=True), **mesh
    )
    assert again.ranks[0].breakdown[Category.GRADIENT] == whole[Category.GRADIENT]
    replicated = run(stages, "8x400", parallelize="ddp", **mesh).ranks[0]
    assert replicated.breakdown[Category.PARAMETER] == nbytes


def test_results() -> None:
    stages = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    found = run(stages, schedule="interleaved1f1b")
    assert [[stage.index for stage in rank.stages] for rank in found.ranks] == [[0, 2], [1, 3]]
    for rank in found.ranks:
        assert sum(rank.breakdown.values()) == rank.peak_bytes == rank.reserved_bytes
    values = json.loads(found.to_json())
    assert values["ranks"][1]["action"] == {"work": "B", "stage": 1, "microbatch": 3}
    last = found.ranks[1]
    assert (last.setup.mesh, last.setup.rank) == ({"pp": 2}, 1)
    assert {node.fqn for node in last.nodes if node.fqn} == {"stage1", "stage3", "loss"}
    assert last.action == StageAction(Work.BACKWARD, 1, 3)
    sent = [o.communication_bytes for o in last.graph.operations if ".send." in o.name]
    assert sent == 3 * 4 * [2 * 4 * 4]  # an output and two gradients of each micro-batch
    with pytest.raises(fxmem.UsageError, match="a rank of a pipeline"):
        fxmem.plan(last, budget="1MiB")
    gpu = run(stages, device="cuda", gpu="t4")
    assert [rank.fits for rank in gpu.ranks] == [True] * 4
    assert "T4" in str(gpu)

"""The search for meshes and knobs: what it finds, and from how many recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import TraceError, UsageError
from fxmem.fitting.mesh_search import Search
from fxmem.fitting.meshes import Place
from fxmem.parallelism.layout import Knobs, Tuned

WIDTH = 64


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        super().__init__(*(each for layer in layers for each in (layer, nn.Tanh())))


def make_model(width: int = WIDTH, blocks: int = 3) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block(width) for _ in range(blocks)))


def fit(model: nn.Module, rows: int, **options: Any) -> fxmem.Fitting:
    width = next(model.parameters()).shape[1]
    options = {"parallelize": "fsdp", "optimizer": "adamw", "loss": "mse", **options}
    return fxmem.fit(model, f"{rows}x{width}", gpu="t4", **options)


def list_meshes(found: fxmem.Fitting) -> list[tuple[dict[str, int], str]]:
    return [(dict(row.mesh), str(row.knobs)) for row in found.rows]


def test_meshes_between_are_computed() -> None:
    model = make_model()
    found = fit(model, 8, gpus=32, gpus_per_node=4)
    assert (found.recordings, len(found.rows)) == (3, 4)
    row = next(row for row in found.rows if not row.is_recorded)
    assert row.mesh == {"replicate": 4, "shard": 8}
    analysis = fxmem.analyze(
        model,
        f"8x{WIDTH}",
        mesh=row.mesh,
        parallelize=Tuned("fsdp", Knobs(reshards=False)),
        optimizer="adamw",
        loss="mse",
        gpu="t4",
    )
    assert (row.peak_bytes, row.reserved_bytes) == (analysis.peak_bytes, analysis.reserved_bytes)
    operations = analysis.graph.operations
    assert sum(row.sent_bytes.values()) == sum(o.communication_bytes for o in operations)
    full_bytes = sum(parameter.nbytes for parameter in model.parameters())
    replicated_bytes = full_bytes // 8 * 2 * 3 // 4
    assert row.sent_bytes == {"shard": 2 * full_bytes * 7 // 8, "replicate": replicated_bytes}
    # Four of the eight ranks that have shards are on a node, and one of each four replicas.
    assert row.far_bytes == row.sent_bytes["shard"] // 4 + row.sent_bytes["replicate"]


def test_padded_shards_are_recorded() -> None:
    assert fit(make_model(width=24), 8, gpus=32, gpus_per_node=4).recordings == 4


def test_the_least_checkpointing_that_fits() -> None:
    found = fit(make_model(1024, blocks=12), 66_000, gpus=2)
    assert [(str(row.knobs), row.fits) for row in found.rows] == [
        ("checkpoint ops, no resharding", "yes")
    ]
    assert 1 / 6 < found.rows[0].recomputed_flops / found.rows[0].flops < 1 / 5.5  # every second
    assert found.recordings == 3  # without, by operator, and without but resharding


def test_offloading_where_nothing_else_fits() -> None:
    found = fit(make_model(16384, blocks=2), 8, gpus=2)
    assert list_meshes(found) == [({"dp": 2}, "offloading")]
    assert found.best is not None


def test_shared_state_of_the_optimizer() -> None:
    found = fit(make_model(8192), 8, gpus=4, parallelize="ddp")
    assert list_meshes(found) == [({"dp": 4}, "sharded optimizer")]


def test_nothing_fits() -> None:
    found = fit(make_model(1024), 1 << 22, gpus=2, parallelize=None)
    assert found.best is None
    assert [row.fits for row in found.rows] == ["no", "no"]
    assert found.recordings == 4  # without checkpoints alone: none would save enough
    text = str(found)
    assert text.startswith("Nothing was found that fits 2 x Tesla T4 (14.56 GiB)\n")
    assert "dp=2 by ddp: out of memory: 16.00 GiB more do not fit" in text


def test_meshes_of_a_function() -> None:
    def parallelize(model: nn.Module, mesh: Any) -> None:
        if mesh["tp"].size() == 4:
            raise ValueError("3 heads on 4 ranks")
        torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"])

    mesh = {"dp": None, "tp": None}
    found = fit(make_model(), 8, gpus=16, gpus_per_node=4, parallelize=parallelize, mesh=mesh)
    assert [(dict(row.mesh), row.fits) for row in found.rows] == [
        ({"dp": 16, "tp": 1}, "yes"),  # four of the ranks that gather are on a node
        ({"dp": 8, "tp": 2}, "yes"),  # two of them are
        ({"dp": 4, "tp": 4}, "no"),
    ]
    assert "3 heads on 4 ranks" in found.rows[-1].cause
    assert str(found.rows[-1].knobs) == ""

    def refuse(model: nn.Module, mesh: Any) -> None:
        raise ValueError("no")

    with pytest.raises(TraceError, match="no"):
        fit(make_model(), 8, gpus=2, parallelize=refuse)


def test_failures_with_more_shards_say_nothing_of_replicas() -> None:
    fitting: Any = SimpleNamespace(exhaustion=None)
    search = Search(lambda place, knobs: fitting, gpus_per_node=8, failed={Knobs(): 16})
    assert not search.fits(Place((("replicate", 2), ("shard", 8)), "fsdp"), Knobs())
    assert search.fits(Place((("dp", 16),), "ddp"), Knobs())


def test_refusals() -> None:
    for options, message in [
        ({"gpus": 0}, "0 GPUs"),
        ({"parallelize": "hsdp"}, "unknown parallelize='hsdp'"),
        ({"mesh": {"dp": None}}, "a mesh without a function"),
        ({"mesh": {"dp": 3}, "parallelize": print}, r"no mesh \{'dp': 3\} has 8 processes"),
        ({"parallelize": print, "mixed_precision": "bf16"}, "mixed_precision is for fsdp and ddp"),
    ]:
        with pytest.raises(UsageError, match=message):
            fit(make_model(), 8, **options)

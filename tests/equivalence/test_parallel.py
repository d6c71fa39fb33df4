"""Planned models laid out on a mesh: names stay, and all ranks compute the same bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fxmem
from fxmem.errors import TraceError, UsageError
from fxmem.parallelism.layout import Layout
from fxmem.parallelism.wrapping import find_blocks, replicate, shard_blocks
from fxmem.planning.plan import MODULES, Plan, Segment
from fxmem.verifying.rank_processes import compare_rank
from fxmem.verifying.running import StepOptions, StepTask

WIDTH = 8
INPUT = f"4x{WIDTH}"
on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this release"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.5, self.training)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class OtherNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def lay_out_wrongly(model: nn.Module, mesh: Any) -> None:
    raise ValueError("no such way")


def split(model: Any, mesh: Any) -> None:
    ways = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, ways)


def split_and_shard(model: Any, mesh: Any) -> None:
    split(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def apply_plan(model: nn.Module) -> nn.Module:
    """Recomputes a block as a whole, one with a segment within, and a module of the last."""
    names = ("blocks.0", "blocks.1", "blocks.2.up")
    inner = (Segment("", "", 1, fqn="blocks.1.up"),)
    segments = (Segment("", "", 1, fqn=n, children=inner if n[-1] == "1" else ()) for n in names)
    return fxmem.apply(model, Plan("", 1, 1, segments=tuple(segments), style=MODULES))


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def take_step(model: nn.Module, seed: int = 0) -> list[tuple[str, Any]]:
    torch.manual_seed(seed)
    model(torch.ones(4, WIDTH)).square().sum().backward()
    named = [(name, p.grad) for name, p in model.named_parameters()]
    return [*named, *model.named_buffers(), ("random", torch.get_rng_state())]


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(shard_blocks, marks=on_cpu),
        replicate,
        split,
        pytest.param(split_and_shard, marks=on_cpu),
    ],
)
def test_wrappers_of_a_planned_model(way: Any) -> None:
    names = ("dp", "tp") if way is split_and_shard else ("dp",)
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    model = Net()
    planned = apply_plan(copy.deepcopy(model))
    assert len(find_blocks(planned)) == 3
    laid_out = [way(each, mesh) or each for each in (model, planned)]
    assert laid_out[0].state_dict().keys() == laid_out[1].state_dict().keys()
    for _ in range(2):
        ours, theirs = map(take_step, laid_out)
        for (name, expected), (other, actual) in zip(ours, theirs, strict=True):
            assert name == other
            local = [getattr(t, "_local_tensor", t) for t in (expected, actual)]
            assert torch.equal(*local), name


@on_cpu
def test_ranks_compute_the_same() -> None:
    layout: dict[str, Any] = {"mesh": {"dp": 1, "tp": 2}, "parallelize": split_and_shard}
    model = Net()
    report = fxmem.verify(model, apply_plan(model), INPUT, steps=2, optimizer="adam", **layout)
    assert report.equal
    assert report.compared["gradient"] == len([*model.parameters()])
    assert report.notes[0].startswith("All 2 ranks were compared; ")
    assert "rank 0 of dp=1,tp=2 by split_and_shard" in str(report)
    predicted = report.planned.predicted_peak_bytes
    assert (
        predicted
        == fxmem.analyze(
            apply_plan(model), INPUT, device="cpu", optimizer="adam", **layout
        ).peak_bytes
    )


@pytest.mark.usefixtures("_alone")
def test_ranks_that_differ() -> None:
    given: Any = ((torch.ones(4, WIDTH),), {})
    cpu = torch.device("cpu")
    task = StepTask(given, cpu, StepOptions(steps=2))
    found = compare_rank(task, (Net(), OtherNet()), Layout((("dp", 1),), "ddp"))
    assert len(found.times[0]) == 1
    assert found.differences[0].kind == "output"


def test_refusals() -> None:
    model = Net()

    def parallelize(model: nn.Module, mesh: Any) -> None: ...

    with pytest.raises(UsageError, match="verify runs each rank on this machine, and 8 are too"):
        fxmem.verify(model, model, INPUT, mesh={"dp": 8}, parallelize="fsdp")
    with pytest.raises(UsageError, match="ranks are processes of their own, to which this cannot"):
        fxmem.verify(model, model, INPUT, mesh={"dp": 2}, parallelize=parallelize)
    with pytest.raises(TraceError, match="a rank fails: ValueError: no such way"):
        fxmem.verify(model, model, INPUT, mesh={"dp": 1}, parallelize=lay_out_wrongly)

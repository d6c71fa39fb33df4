"""A rank of a script."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from sample_nets.scripts import Write
from torch import nn

import fxmem
from fxmem import UsageError
from fxmem.gpus import CONTEXT_BYTES

BLOCKS = """
import sys, torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.distributed.fsdp import fully_shard

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


SHARDED = """
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
device = torch.device("cuda", rank)
with torch.device("meta"):
    model = Blocks()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device=device)
for module in model.modules():
    if isinstance(module, nn.Linear):
        module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64, device=device)
for _ in range(9):
    optimizer.zero_grad()
    output = model(x)
    loss = output.sum()
    loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_a_rank_of_a_script_takes_what_it_takes_in_an_analysis(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS + SHARDED)
    (tmp_path / "net.py").write_text(BLOCKS)
    run = fxmem.run(str(tmp_path / "train.py"), world_size=4, rank=1)
    options = {"mesh": {"dp": 4}, "parallelize": "fsdp", "rank": 1, "optimizer": "adamw"}
    analysis = fxmem.analyze(f"{tmp_path}/net.py:Blocks", "32x64", **options)  # type: ignore[arg-type]
    assert run.steps[1].peak_bytes == analysis.peak_bytes
    assert run.steps[1].parameter_bytes == analysis.parameter_bytes


def test_a_script_sees_the_backend_that_it_asked_for(write: Write) -> None:
    """With NCCL the gradient of a gathered tensor is reduced as it is scattered."""
    script = write("""
        import warnings
        import torch.distributed as dist
        from torch.distributed.nn.functional import all_gather

        warnings.simplefilter("ignore")  # it is deprecated from 2.13 on
        dist.init_process_group(backend="nccl")
        assert dist.get_backend() == dist.Backend.NCCL
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
        x = torch.ones(8, device="cuda", requires_grad=True)
        torch.cat(all_gather(x)).sum().backward()
    """)
    graph = fxmem.run(str(script), world_size=4).largest.graph
    names = [operation.name for operation in graph.operations]
    assert any("reduce_scatter" in name for name in names) and "aten.stack.default" not in names


def test_a_rank_that_is_not_there(write: Write) -> None:
    with pytest.raises(UsageError, match="no rank 4 of 4"):
        fxmem.run(str(write("")), world_size=4, rank=4)


def test_a_script_under_a_wrapper_has_names_and_the_buffers_of_nccl(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BLOCKS
        + textwrap.dedent(
            """
            torch.distributed.init_process_group("nccl")
            model = nn.parallel.DistributedDataParallel(Blocks().cuda(), device_ids=[0])
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):
                model(torch.randn(4, 64, device="cuda")).sum().backward()
                optimizer.step()
            """
        )
    )
    run = fxmem.run(str(script), world_size=2)
    assert "model.module.blocks.2.0" in {node.name for node in run.largest.nodes}
    analysis = fxmem.analyze(nn.Linear(4, 4), "2x4", mesh={"dp": 2}, parallelize="ddp")
    assert run.largest.context_bytes == analysis.context_bytes  # with the buffers of NCCL
    assert fxmem.run(str(script), world_size=1).largest.context_bytes == CONTEXT_BYTES

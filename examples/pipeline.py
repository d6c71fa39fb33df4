"""A GPT as the stages of a pipeline, split as torchtitan does: copies without the other layers.

fxmem pipeline examples/pipeline.py:split --input 32x512:int64 --loss cross_entropy
"""

from __future__ import annotations

from gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


class Stage(GPT):
    """A part of a GPT: tokens or hidden states to hidden states or scores."""

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            positions = self.positions.weight[: x.shape[1]]
            x = self.tokens(x) + positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def split(stages: int = 4, layers: int = 8) -> list[nn.Module]:
    """Splits the blocks evenly; the first stage has the embeddings, the last the head."""
    made: list[nn.Module] = []
    for index in range(stages):
        stage = Stage(layers // stages)
        stage.head.weight = nn.Parameter(stage.head.weight.detach().clone())  # not tied any more
        if index > 0:
            stage.tokens = stage.positions = None
        if index < stages - 1:
            stage.norm = stage.head = None
        made.append(stage)
    return made


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    """Shards a stage; its blocks are gathered once for all micro-batches."""
    for block in stage.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)

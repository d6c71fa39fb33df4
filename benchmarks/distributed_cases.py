"""Small models on several ranks: how each is built, wrapped and trained."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LLAMA: Any = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "llama.py"))
_DIM = 129  # which no ranks share evenly


class Block(nn.Module):
    """A normalised two-layer perceptron with a residual."""

    def __init__(self, hidden: int, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_DIM) if batch_norm else nn.LayerNorm(_DIM)
        self.up, self.down = nn.Linear(_DIM, hidden), nn.Linear(hidden, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Chain(nn.Sequential):
    """A stem, blocks and a head."""

    def __init__(self, hidden: int = 515, *, batch_norm: bool = False) -> None:
        self.blocks = [Block(hidden, batch_norm=batch_norm) for _ in range(3)]
        super().__init__(nn.Linear(_DIM, _DIM), *self.blocks, nn.Linear(_DIM, _DIM))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the linear layer does, and the adapter's correction."""
        return self.linear(x) + self.b(self.a(x))


def build_adapted() -> nn.Module:
    """Builds a frozen chain whose blocks have adapters."""
    model = Chain().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[assignment]
    return model


def build_llama(*, tied: bool = False) -> nn.Module:
    """Builds the Llama of the examples, of two layers."""
    model: nn.Module = LLAMA["Llama"](length=64, layers=2)
    if tied:
        model.output.weight = model.tok_embeddings.weight  # type: ignore[union-attr]
    return model


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    checkpoints: bool = False,
    prefetches: bool = False,
    **options: Any,
) -> nn.Module:
    """Shards each block and then the root, as torchtitan does."""
    blocks: Any = [block for block in model.modules() if type(block).__name__ == "Block"]
    for block in blocks:
        fully_shard(checkpoint_block(model, block) if checkpoints else block, mesh=mesh, **options)
    for block, after in pairwise(blocks):
        if prefetches:
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    fully_shard(model, mesh=mesh, **options)
    return model


def flatten(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shards the flat parameter of each block, and that of the rest, as FSDP1 does."""
    policy = ModuleWrapPolicy([Block])
    device = torch.device(mesh.device_type)
    return FullyShardedDataParallel(
        model, device_mesh=mesh, auto_wrap_policy=policy, device_id=device, **options
    )


def checkpoint_block(model: nn.Module, block: nn.Module) -> nn.Module:
    """Puts a block with a checkpoint in a block's place."""
    path = next(name for name, module in model.named_modules() if module is block)
    wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
    model.set_submodule(path, wrapped)
    return wrapped


def replicate_model(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Wraps a model in DistributedDataParallel."""
    return DistributedDataParallel(model, device_mesh=mesh, **options)


def replicate_in_place(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicates a model without a wrapper."""
    replicate(model, device_mesh=mesh)


def split_chain(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the perceptrons of a chain over the ranks."""
    for block in model.children():
        if isinstance(block, Block):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _zero(parameters: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW)


@dataclass(frozen=True)
class DistributedCase:
    """A model, how it is wrapped for a mesh, and the step that each of the mesh's ranks takes.

    Attributes:
        name: Of the case.
        mesh: Sizes of the mesh's dimensions, by name.
        parallelize: Wraps the model, in place or not.
        build: Makes the model.
        optimizer: Makes the optimizer from the parameters.
        loop: Settings of fxmem's loop: ``accumulate`` and ``clip_grad``.
    """

    name: str
    mesh: Mapping[str, int]
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    build: Callable[[], nn.Module] = Chain
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    loop: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
        return prod(self.mesh.values())

    def make_step(self) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
        """Makes the model, the input of one rank, and the loss."""
        torch.manual_seed(0)
        model = self.build()
        if isinstance(model, Chain):
            return model, torch.randn(64, _DIM), torch.sum
        return model, torch.randint(0, 500, (2, 32)), LLAMA["next_token_loss"]


_TWO, _FOUR, _TP = {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}
_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
_MIXED = MixedPrecision(torch.bfloat16, torch.float32)
_KEPT = ShardingStrategy.SHARD_GRAD_OP
_VIEWS = {"gradient_as_bucket_view": True}
_TIED = partial(build_llama, tied=True)
_fsdp, _fsdp_and_tp = LLAMA["parallelize_fsdp"], LLAMA["parallelize_2d"]
_clip, _accumulate = {"clip_grad": True}, {"accumulate": 2}
_reduce_last = {"accumulate": 2, "reduce_each": False}

CASES = [
    DistributedCase("fsdp", _TWO, shard),
    DistributedCase("fsdp, kept after forward", _TWO, partial(shard, reshard_after_forward=False)),
    DistributedCase("fsdp, bf16", _TWO, partial(shard, **_BF16)),
    DistributedCase("fsdp, prefetching", _TWO, partial(shard, prefetches=True)),
    DistributedCase("fsdp, checkpoints", _TWO, partial(shard, checkpoints=True)),
    DistributedCase("fsdp, SGD", _TWO, shard, optimizer=_sgd),
    DistributedCase("fsdp, foreach", _TWO, shard, optimizer=partial(_adamw, foreach=True)),
    DistributedCase("fsdp, accumulation", _TWO, shard, loop=_accumulate),
    DistributedCase("fsdp, last reduction", _TWO, partial(shard, **_BF16), loop=_reduce_last),
    DistributedCase("fsdp, clipping", _TWO, shard, loop=_clip),
    DistributedCase("fsdp, frozen with adapters", _TWO, shard, build_adapted),
    DistributedCase("fsdp, tied Llama", _TWO, shard, _TIED),
    DistributedCase("fsdp, Llama, bf16", _TWO, partial(_fsdp, checkpoints=None), build_llama),
    DistributedCase("fsdp, Llama, selective checkpoints", _TWO, _fsdp, build_llama),
    DistributedCase("fsdp1", _TWO, flatten),
    DistributedCase("fsdp1, own parameters", _TWO, partial(flatten, use_orig_params=True)),
    DistributedCase("fsdp1, bf16", _TWO, partial(flatten, mixed_precision=_MIXED)),
    DistributedCase("fsdp1, kept", _TWO, partial(flatten, sharding_strategy=_KEPT)),
    DistributedCase("hsdp", {"replicate": 2, "shard": 2}, shard),
    DistributedCase("fsdp on 4, kept on 2", {"dp": 4}, partial(shard, reshard_after_forward=2)),
    DistributedCase("ddp", _TWO, replicate_model),
    DistributedCase("ddp, small buckets", _TWO, partial(replicate_model, bucket_cap_mb=1)),
    DistributedCase("ddp, views", _TWO, partial(replicate_model, bucket_cap_mb=1, **_VIEWS)),
    DistributedCase("ddp, static graph", _TWO, partial(replicate_model, static_graph=True)),
    DistributedCase("ddp, unused", _TWO, partial(replicate_model, find_unused_parameters=True)),
    DistributedCase(
        "ddp, accumulation", _TWO, partial(replicate_model, **_VIEWS), loop=_accumulate
    ),
    DistributedCase("ddp, batch norm", _TWO, replicate_model, partial(Chain, batch_norm=True)),
    DistributedCase("ddp, ZeRO-1", _TWO, replicate_model, optimizer=_zero),
    DistributedCase("ddp in place", _TWO, replicate_in_place),
    DistributedCase("ddp in place, last reduction", _TWO, replicate_in_place, loop=_reduce_last),
    DistributedCase("tp", {"tp": 2}, split_chain, partial(Chain, 514)),
    DistributedCase("tp, Llama", _TP, partial(_fsdp_and_tp, checkpoints=None), build_llama),
    DistributedCase("fsdp and tp", _FOUR, partial(_fsdp_and_tp, checkpoints=None), build_llama),
    DistributedCase("fsdp and tp, checkpoints", _FOUR, _fsdp_and_tp, build_llama),
]
"""All cases; small in order to run on two cores."""

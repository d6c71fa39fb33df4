"""Small models on several ranks: how each is built, wrapped and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """A normalised two-layer perceptron with a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """A stem, blocks and a head; dimensions that no two ranks share evenly, by default."""

    def __init__(self, dim: int = 129, hidden: int = 515, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal attention, with as many heads as the projections have columns for."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """A gated perceptron."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """A layer of a Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(dim, 16)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the input's shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A tiny Llama without rotary embeddings."""

    def __init__(
        self, dim: int = 128, hidden: int = 320, vocabulary: int = 500, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits: (batch, length, vocabulary)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the linear layer does, and the adapter's correction."""
        return self.linear(x) + self.b(self.a(x))


def build_adapted() -> nn.Module:
    """Builds a frozen chain whose blocks have adapters."""
    model = Chain().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[assignment]
    return model


def shard(
    model: nn.Module, mesh: DeviceMesh, *, checkpoints: bool = False, **options: Any
) -> nn.Module:
    """Shards each block and then the root, as torchtitan does."""
    blocks = model.layers if isinstance(model, Llama) else model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for name, block in [*blocks.named_children()]:
        if checkpoints:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
            blocks.register_module(name, block)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def replicate(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Wraps a model in DistributedDataParallel."""
    return DistributedDataParallel(model, device_mesh=mesh, **options)


def split_chain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the perceptrons of a chain over the ranks."""
    assert isinstance(model, Chain)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def split_llama(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Splits a Llama over the ranks, as torchtitan does; ``sequence`` splits the norms too."""
    assert isinstance(model, Llama)
    inner = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=inner),
        "output": ColwiseParallel(input_layouts=inner, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    gather = partial(PrepareModuleInput, input_layouts=(inner,))
    for layer in model.layers:
        layer_plan: dict[str, Any] = {
            "attention": gather(desired_input_layouts=(Replicate(),)),
            **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=inner),
            "feed_forward": gather(desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=inner),
            "feed_forward.w3": ColwiseParallel(),
        }
        if sequence:
            layer_plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(layer, mesh, layer_plan)
    return model


def split_and_shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Splits a Llama over one dimension of the mesh and shards what is left over the other."""
    return shard(split_llama(model, mesh["tp"], sequence=True), mesh["dp"], **options)


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _zero(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)


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
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]
    build: Callable[[], nn.Module] = Chain
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    loop: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
        return prod(self.mesh.values())

    def model(self) -> nn.Module:
        """Builds the model."""
        torch.manual_seed(0)
        return self.build()

    def inputs(self) -> tuple[Tensor, ...]:
        """Makes the inputs of one rank."""
        if isinstance(self.model(), Chain):
            return (torch.randn(64, 129),)
        return (torch.randint(0, 500, (2, 32)),)


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_TWO, _FOUR = {"dp": 2}, {"dp": 2, "tp": 2}
_HYBRID = {"replicate": 2, "shard": 2}
_VIEWS = {"gradient_as_bucket_view": True}

CASES = [
    DistributedCase("fsdp", _TWO, shard),
    DistributedCase("fsdp, kept after forward", _TWO, partial(shard, reshard_after_forward=False)),
    DistributedCase("fsdp, bf16", _TWO, partial(shard, mp_policy=_BF16)),
    DistributedCase("fsdp, checkpoints", _TWO, partial(shard, checkpoints=True)),
    DistributedCase("fsdp, SGD", _TWO, shard, optimizer=_sgd),
    DistributedCase("fsdp, foreach", _TWO, shard, optimizer=partial(_adamw, foreach=True)),
    DistributedCase("fsdp, accumulation", _TWO, shard, loop={"accumulate": 2}),
    DistributedCase("fsdp, clipping", _TWO, shard, loop={"clip_grad": True}),
    DistributedCase("fsdp, frozen with adapters", _TWO, shard, build_adapted),
    DistributedCase("fsdp, Llama", _TWO, shard, Llama),
    DistributedCase("fsdp, tied Llama", _TWO, shard, partial(Llama, tied=True)),
    DistributedCase("hsdp", _HYBRID, shard),
    DistributedCase("fsdp on 4, kept on 2", {"dp": 4}, partial(shard, reshard_after_forward=2)),
    DistributedCase("ddp", _TWO, replicate),
    DistributedCase("ddp, small buckets", _TWO, partial(replicate, bucket_cap_mb=1)),
    DistributedCase("ddp, views", _TWO, partial(replicate, bucket_cap_mb=1, **_VIEWS)),
    DistributedCase("ddp, static graph", _TWO, partial(replicate, static_graph=True)),
    DistributedCase("ddp, unused", _TWO, partial(replicate, find_unused_parameters=True)),
    DistributedCase(
        "ddp, accumulation", _TWO, partial(replicate, **_VIEWS), loop={"accumulate": 2}
    ),
    DistributedCase("ddp, ZeRO-1", _TWO, replicate, optimizer=_zero),
    DistributedCase("tp", {"tp": 2}, split_chain, partial(Chain, hidden=514)),
    DistributedCase("tp, Llama", {"tp": 2}, split_llama, Llama),
    DistributedCase("tp, Llama, sequence", {"tp": 2}, partial(split_llama, sequence=True), Llama),
    DistributedCase("fsdp and tp", _FOUR, split_and_shard, Llama),
    DistributedCase(
        "fsdp and tp, checkpoints", _FOUR, partial(split_and_shard, checkpoints=True), Llama
    ),
]
"""All cases; small in order to run on two cores."""

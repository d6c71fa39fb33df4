"""Llama 3 in plain PyTorch, on many GPUs: FSDP2, tensor parallelism and checkpoints.

fxmem analyze examples/llama.py:Llama --input 2x512:int64 --fsdp 8
fxmem analyze 'examples/llama.py:Llama("tiny", layers=2)' --input 2x512:int64 --mode infer

Laid out as torchtitan does, by `--mesh dp=8 --parallelize examples/llama.py:parallelize_fsdp`.
`python examples/llama.py` compares checkpoints of the tiny one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
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
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the hidden layers are 8/3 as wide, times ``stretch``, rounded up."""

    width: int
    layers: int
    heads: int
    key_heads: int
    stretch: float = 1.3
    multiple_of: int = 4096
    vocabulary: int = 128_256


CONFIGS = {
    "tiny": Config(256, 4, 16, 4, multiple_of=256, vocabulary=2048),
    "8B": Config(4096, 32, 32, 8, multiple_of=1024),
    "70B": Config(8192, 80, 64, 8),
    "405B": Config(16384, 126, 128, 8, stretch=1.2),
}


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def compute_rotations(length: int, size: int) -> Tensor:
    """Computes unit complex numbers (length, size / 2), one angle per position and pair."""
    speeds = 500_000.0 ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(length), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotates pairs of features of heads (batch, length, heads, size) by their position."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * rotations[: x.shape[1], None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Attention(nn.Module):
    """Causal attention in which several queries share a key."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.sharing = config.heads // config.key_heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        # With tensor parallelism a rank computes some of the heads: -1 counts them.
        query, key, value = (
            linear(x).view(*x.shape[:2], -1, self.size) for linear in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, rotations), rotate(key, rotations)
        shared = *key.shape[:3], self.sharing, self.size
        key, value = (y[:, :, :, None].expand(shared).flatten(2, 3) for y in (key, value))
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """The SwiGLU network on each token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = int(config.stretch * int(8 * config.width / 3))
        hidden = -(-hidden // config.multiple_of) * config.multiple_of
        self.w1 = nn.Linear(config.width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention, then the feed-forward network, both with a norm before and a shortcut."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.width)
        self.ffn_norm = RMSNorm(config.width)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder-only transformer.

    Args:
        name: One of ``CONFIGS``.
        length: The longest input.
        layers: Number of blocks, if not the configuration's own.
    """

    def __init__(self, name: str = "tiny", length: int = 8192, layers: int | None = None) -> None:
        super().__init__()
        config = CONFIGS[name]
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.register_buffer("rotations", compute_rotations(length, config.width // config.heads))
        self.layers = nn.ModuleList(Block(config) for _ in range(layers or config.layers))
        self.norm = RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


def next_token_loss(logits: Tensor) -> Tensor:
    """Cross entropy of logits (batch, length, vocabulary) in float32, with labels made up."""
    labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def make_contexts() -> tuple[Any, Any]:
    """Saves every second matrix product, and what is as dear; recomputes everything else."""
    products: Counter[bool] = Counter()

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in SAVED
        if operator == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def checkpoint(model: nn.Module, choice: str | int | None) -> None:
    """Checkpoints blocks: by operator (``"op"``), ``"full"``, every n-th, or none (None)."""
    settings = {"context_fn": make_contexts} if choice == "op" else {}
    every = choice if isinstance(choice, int) else 1
    for index, block in enumerate(model.layers if choice else ()):
        if (index + 1) % every == 0:
            model.layers[index] = checkpoint_wrapper(block, preserve_rng_state=False, **settings)


def parallelize_fsdp(
    model: nn.Module, mesh: DeviceMesh, checkpoints: str | int | None = "op"
) -> None:
    """Shards parameters, gradients and optimizer state over the dimension ``dp``."""
    checkpoint(model, checkpoints)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mesh": mesh["dp"], "mp_policy": precision}
    for index, block in enumerate(model.layers):
        # The last block's parameters are needed again at once.
        fully_shard(block, reshard_after_forward=index < len(model.layers) - 1, **settings)
    fully_shard(model, **settings)


def parallelize_2d(
    model: nn.Module,
    mesh: DeviceMesh,
    checkpoints: str | int | None = "full",
    loss_parallel: bool = False,
) -> None:
    """Splits blocks over ``tp``, with activations split by position between them, then ``dp``.

    With ``loss_parallel`` the logits stay split by vocabulary, and loss and backward run under
    ``torch.distributed.tensor.parallel.loss_parallel()``.
    """
    root = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    parallelize_module(model, mesh["tp"], root)
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.layers:
        parallelize_module(block, mesh["tp"], plan)
    parallelize_fsdp(model, mesh, checkpoints)


def main() -> None:
    """Prints the peak of each way to checkpoint a small model on 8 GPUs."""
    import fxmem
    from fxmem.units import format_bytes

    for choice in (None, 2, "op", "full"):
        analysis = fxmem.analyze(
            Llama(),
            ("2x2048:int64",),
            mesh={"dp": 8},
            parallelize=partial(parallelize_fsdp, checkpoints=choice),
            loss=next_token_loss,
            optimizer="adamw",
        )
        print(f"checkpoints {choice}: {format_bytes(analysis.peak_bytes)}")


if __name__ == "__main__":
    main()

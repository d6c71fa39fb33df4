"""Small models of our own, each with one feature that memory accounting tends to get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import import_torchvision


def mlp(width: int, hidden: int, *, dropout: float = 0.0) -> nn.Sequential:
    """Returns Linear, GELU, Dropout, Linear."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )


class UNet(nn.Module):
    """Skips keep early, large activations alive until late; concatenation copies them."""

    def __init__(self, channels: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth + 1)]
        self.stem = self._block(3, widths[0])
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(self._block(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 5, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent encoder over embeddings with a linear head on the last state."""

    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 48)
        self.core = kind(48, 64, batch_first=True, **kwargs)
        self.head = nn.Linear(128 if kwargs.get("bidirectional") else 64, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.core(self.embed(tokens))
        return self.head(states)


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, which takes a fused path in inference."""

    def __init__(self, *, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.1, batch_first=True, norm_first=norm_first
        )
        self.core = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x)


class InPlace(nn.Module):
    """In-place activations and arithmetic, also through views (`CopySlices` in backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu_()
        y = y * 2
        y[:, :32] = 0
        y[:, 32:64].add_(1.5)
        y = y.clone().mul_(y.detach().sigmoid_())
        z = self.second(y).add_(x)
        z.masked_fill_(z < 0, 0.1)
        return F.hardtanh_(z * 1.0)


class TiedWeights(nn.Module):
    """One parameter used by the embedding and the output, so two gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.body = mlp(64, 256)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.body(x))


class Reused(nn.Module):
    """One block called three times: one set of weights, three sets of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return x


class DictOutput(nn.Module):
    """Nested outputs: a view, an integer, a detached tensor and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(64, 192), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.body(x) * scale
        logits = self.head(hidden)
        extra = [hidden[:, :8], logits.argmax(-1), (logits.detach().exp(), logits)]
        return {"logits": logits, "extra": extra}


@dataclass
class Heads:
    """Two heads and no loss."""

    mean: torch.Tensor
    scale: torch.Tensor
    loss: torch.Tensor | None = None


class DataclassOutput(nn.Module):
    """A dataclass with a `.loss` that stays None unless labels come."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.scale = mlp(64, 192), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Heads:
        hidden = self.body(x)
        mean, scale = self.mean(hidden), F.softplus(self.scale(hidden))
        loss = None if target is None else F.gaussian_nll_loss(mean, target, scale)
        return Heads(mean, scale, loss)


class Checkpointed(nn.Module):
    """Four blocks with dropout, the middle two checkpointed by the user."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(64, 256, dropout=0.1) for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            inner = i in (1, 2)
            x = x + (checkpoint(block, x, use_reentrant=self.use_reentrant) if inner else block(x))
        return x


class _Swish(torch.autograd.Function):
    """Saves its input alone, and keeps a scalar on the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.beta * x)
        return grad * (gate + ctx.beta * x * gate * (1 - gate)), None


class CustomFunction(nn.Module):
    """A `torch.autograd.Function` between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Swish.apply(layer(x), 1.5)
        return x


class Views(nn.Module):
    """Chunks, transposes, expands, unbinds: many tensors, few storages."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(64, 192), nn.Parameter(torch.zeros(1, 1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.einsum("bqd,bkd->bqk", q, k).softmax(-1)
        mixed = (scores @ v).transpose(0, 1).contiguous().transpose(0, 1)
        rows = torch.stack((mixed + self.bias.expand_as(mixed)).unbind(1)[::2], dim=1)
        return F.pad(rows, (1, 1)).roll(1, dims=-1).flatten(1)


class Norms(nn.Module):
    """Every usual normalisation and a row of activations, with a functional twist or two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 16, 3, padding=1, groups=4))
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)]
        )
        self.last, self.prelu = nn.RMSNorm(16), nn.PReLU(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        for norm, act in zip(self.norms, (F.leaky_relu, F.elu, F.mish), strict=True):
            x = act(norm(x))
        x = self.prelu(F.dropout2d(x, 0.2, self.training))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = F.avg_pool2d(F.local_response_norm(x, 3), 2)
        x = F.glu(torch.cat([x, x.std(dim=1, keepdim=True).expand_as(x)], dim=1), dim=1)
        return self.last(x.movedim(1, -1)).log_softmax(-1).amax(dim=(1, 2))


class HandRolledRNN(nn.Module):
    """A Python loop over time that writes into a preallocated output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 48)
        outputs = x.new_empty(x.shape[0], x.shape[1], 48)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs[:, t] = state
        return outputs


class FlexBlock(nn.Module):
    """Causal attention within a window as `flex_attention` has it, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp(width, 4 * width)

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = flex_attention(q, k, v, block_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class FlexDecoder(nn.Module):
    """A decoder with `flex_attention`, which a GPU runs in one kernel where it is compiled."""

    def __init__(self, vocabulary: int = 8192, width: int = 768, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(FlexBlock(width, 12) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = create_block_mask(_is_seen, None, None, length, length, device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def _is_seen(
    batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return (query >= key) & (query - key < 256)


class Bag(nn.Module):
    """Embedding bags and gathers: integer tensors are saved, and gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(300, 32, mode="mean"), nn.Embedding(300, 32)
        self.score = nn.Bilinear(32, 32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pooled = self.bag(tokens)
        picked = self.table(tokens)[:, 0]
        best = self.score(pooled, picked).topk(3, dim=-1).values
        return torch.where(best > 0, best, best.cumsum(-1))


class LowPrecision(nn.Module):
    """A bfloat16 model with a float32 island, as mixed-precision code writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(128, 512).to(torch.bfloat16)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x.to(torch.bfloat16)).float()
        return self.norm(x + y).to(torch.bfloat16)


class MixtureOfExperts(nn.Module):
    """Dense routing: every expert runs, a softmax gate weighs them."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(64, experts)
        self.experts = nn.ModuleList(mlp(64, 128) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x).softmax(-1).unbind(-1)
        return sum(g.unsqueeze(-1) * e(x) for g, e in zip(gate, self.experts, strict=True))


def frozen_resnet18() -> nn.Module:
    """Returns a ResNet-18 whose stem and first two stages do not train."""
    model = import_torchvision().models.resnet18(weights=None)
    for module in (model.conv1, model.bn1, model.layer1, model.layer2):
        module.requires_grad_(False)
    return model

"""Small models with what trips those who compute things again: statistics, states, caches, ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Normalised(nn.Module):
    """Convolutions, each with a normalisation that some function makes."""

    def __init__(self, make: Any, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(make(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class FrozenNorms(Normalised):
    """Normalisations that stay in ``eval()`` in training, as fine-tuning keeps them."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d)

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for norm in self.norms:
            norm.eval()
        return self


class HalfFrozen(Normalised):
    """One normalisation in ``eval()``, with parameters that do not train; the others train."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d)
        self.norms[0].requires_grad_(False)

    def train(self, mode: bool = True) -> HalfFrozen:
        super().train(mode)
        self.norms[0].eval()
        return self


class Reparametrized(nn.Module):
    """Layers whose weights some function reparametrizes."""

    def __init__(self, wrap: Any, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(nn.Linear(width, width)) for _ in range(blocks))
        self.feed = nn.Sequential(
            wrap(nn.Linear(width, 4 * width)), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x + self.feed(x)


class Symmetric(nn.Module):
    """A parametrization by hand."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def make_symmetric(layer: nn.Linear) -> nn.Module:
    """A layer whose weight is symmetric where it is square."""
    if layer.in_features == layer.out_features:
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Containers(nn.Module):
    """Containers within containers, one of whose modules lies in two of them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block() -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            )

        shared = block()
        self.paths = nn.ModuleDict(
            {
                "left": nn.ModuleList([block(), nn.Sequential(block(), nn.Dropout(0.1))]),
                "right": nn.ModuleList([shared, nn.Sequential(nn.LayerNorm(width), shared)]),
            }
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.tail = nn.Sequential(nn.Sequential(nn.Sequential(block())), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        for name, scale in zip(("left", "right"), self.scales, strict=True):
            for part in self.paths[name]:
                x = x + part(x) * scale
        return self.tail(x)


class Arguments(nn.Module):
    """Blocks that take keywords, None, numbers, lists and dicts of tensors."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(
            self,
            x: Tensor,
            mask: Tensor | None = None,
            *,
            scale: float,
            extra: dict[str, Any],
            how: str = "gelu",
        ) -> tuple[Tensor, None, dict[str, Any]]:
            y = getattr(F, how)(self.layer(x))
            y = self.other(y) * scale
            if mask is not None:
                y = y.masked_fill(mask > 1, 0.0)
            return x + y + extra["bias"], None, {**extra, "last": [y]}

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Arguments.Block(width) for _ in range(3))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor, flag: bool = True
    ) -> tuple[Tensor, Tensor]:
        extra: dict[str, Any] = {"bias": bias, "flag": flag, "last": []}
        for number, block in enumerate(self.blocks):
            given = mask if number != 1 else None
            x, _, extra = block(x, given, scale=0.5 + number, extra=extra)
        return x, extra["last"][0]


class Aliases(nn.Module):
    """Hands on its input, a view of it, a parameter, and one result under two names."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.second(torch.sigmoid(self.first(x)))
        rest = {"input": x, "half": x[: len(x) // 2], "weight": self.first.weight.t()}
        return {"y": y, "again": y, "view": y.view(-1, 4), "rest": (rest, y[0])}


class WritesInput(nn.Module):
    """Changes its input in place, and a slice of what it makes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-2, 2)
        y = F.silu(self.first(x))
        y[:, ::2] *= 0.5
        return F.relu(self.second(y), inplace=True) + x


class InPlaceBlocks(nn.Module):
    """Blocks that begin with an operation in place, on their input or on a view of it."""

    class Block(nn.Module):
        def __init__(self, width: int, by_view: bool) -> None:
            super().__init__()
            self.layer, self.by_view = nn.Linear(width, width), by_view

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(-1, x.shape[-1]).mul_(0.5) if self.by_view else F.relu(x, inplace=True)
            return torch.tanh(self.layer(x)) * 2

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(self.Block(width, at % 2 == 1) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Noise(nn.Module):
    """Dropout of several kinds, noise of the global generator and of one of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.dropouts = nn.ModuleList([nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.Dropout1d(0.3)])
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        for layer, dropout in zip(self.layers, self.dropouts, strict=False):
            x = dropout(F.selu(layer(x)))
            x = x + 0.1 * torch.randn_like(x)
        noise = torch.rand(x.shape, generator=self.generator)
        x = torch.where(torch.bernoulli(torch.full_like(x, 0.9)) > 0, x, noise)
        return F.rrelu(self.layers[-1](x), training=self.training)


class Counting(nn.Module):
    """Keeps running values in buffers, beside blocks that keep none."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, 4 * width)
            self.out = nn.Linear(4 * width, width)
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
            return x + self.out(F.gelu(self.layer(x - self.mean)))

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting.Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Closure(nn.Module):
    """Blocks that count and remember in what they close over."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        running = torch.zeros(x.shape[-1])

        def remember(y: Tensor) -> Tensor:
            seen.append(y.detach().mean(0))
            running.add_(seen[-1])
            return y * len(seen)

        for layer in self.layers:
            x = x + remember(layer(x)) + running
        self.calls += 1
        self.seen = seen
        return x / self.calls


class DataDependent(nn.Module):
    """Sizes and paths that depend on values."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(F.gelu(x)))
        chosen = x[x.mean(-1) > x.mean()]
        return torch.cat([chosen.sum(0, keepdim=True), x * (1 + chosen.shape[0])])


class AutocastInside(nn.Module):
    """Autocast within forward, on and off again, with a backward outside of it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layers[0](x))
        with torch.autocast("cpu", torch.bfloat16):
            y = F.gelu(self.layers[1](x))
            y = F.gelu(self.layers[2](y))
            with torch.autocast("cpu", enabled=False):
                y = F.gelu(self.layers[3](y.float()))
            y = self.layers[4](y)
        return self.norm(x + y.float())


class Slopes(nn.Module):
    """Steps down the slope of what layers say, as forces follow from an energy."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(block(z).square().sum(), z, create_graph=True)
            x = x - 0.1 * slope
        return self.head(x)


class Unrolled(nn.Module):
    """One cell for all moments, whose weights autocast casts once."""

    def __init__(self, width: int = 32, moments: int = 6) -> None:
        super().__init__()
        self.moments = moments
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        outputs = []
        for moment in range(self.moments):
            h, c = self.cell(self.inner(x * (moment + 1)), (h, c))
            outputs.append(torch.tanh(h))
        return self.head(torch.stack(outputs))


class Adapted(nn.Module):
    """Frozen layers, each with a small one that trains beside it."""

    def __init__(self, width: int = 32, rank: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.frozen.requires_grad_(False)
        self.inner = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, inner, outer in zip(self.frozen, self.inner, self.outer, strict=True):
            x = x + F.gelu(frozen(x) + outer(F.dropout(inner(x), 0.1, self.training)))
        return x


class Cached(nn.Module):
    """Attention whose blocks append to a cache that they are given, and read all of it."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.feed = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            cache.append((k, v))
            keys, values = (torch.cat(part, 1) for part in zip(*cache, strict=True))
            x = x + F.scaled_dot_product_attention(q, keys, values)
            return x + self.feed(x)

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached.Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache: list[tuple[Tensor, Tensor]] = []
        for block in self.blocks:
            x = block(x, cache)
        return x, cache


@dataclass
class Nested:
    """A dataclass with a tuple, a dict and None in it."""

    logits: Tensor
    states: tuple[Tensor, ...]
    parts: dict[str, Tensor]
    loss: Tensor | None = None


class NestedOutput(nn.Module):
    """All blocks' states in a dataclass, held to the end."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Nested:
        states = [x]
        for block in self.blocks:
            states.append(states[-1] + block(states[-1]))
        return Nested(states[-1], tuple(states[1:-1]), {"first": states[1][:, :4]})


class ComplexAndDouble(nn.Module):
    """Complex numbers, doubles and integers on the way."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(F.gelu(self.first(x))) * self.filter
        z = torch.fft.irfft(y, n=x.shape[-1]).double().tanh().float()
        order = z.argsort(-1)
        return self.second(z.gather(-1, order)) + x


class Ragged(nn.Module):
    """Packed sequences through an LSTM, after an embedding shared with the head."""

    def __init__(self, words: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.core = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = torch.arange(tokens.shape[0], 0, -1) + 3
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.core(packed)[0], batch_first=True)
        return F.linear(states + self.feed(states), self.embed.weight)

"""Small models whose graphs trip planners: skips, in-place changes, dropout, several ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm


class Residual(nn.Module):
    """Residual blocks as torchvision writes them, changed in place."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, momentum=None) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            x = F.relu(y, inplace=True)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Attention written out, with dropout, and two results of one operation."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        batch, length, width = x.shape
        for norm, inner, outer, feed in zip(
            self.norms, self.inner, self.outer, self.feed, strict=True
        ):
            split = inner(norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = split.unbind(0)
            weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.1, self.training)
            y = (weights @ v).transpose(1, 2).reshape(batch, length, width)
            x = x + F.dropout(outer(y), 0.1, self.training)
            x = x + feed(x)
        return {"hidden": x, "pooled": x.mean(1)}


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, growth: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + i * growth) for i in range(layers))
        self.convs = nn.ModuleList(
            nn.Conv2d(3 + i * growth, growth, 3, padding=1) for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(torch.relu(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


class UNet(nn.Module):
    """Skips that span everything within."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1)
            for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.up = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((6 * width, 2 * width), (3 * width, width))
        )
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = F.silu(conv(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2.0)
        skips.pop()
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.silu(conv(torch.cat((x, skips.pop()), 1)))
        return self.head(x)


class Tied(nn.Module):
    """An LSTM between an embedding and its own weight, transposed; one module called twice."""

    def __init__(self, words: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(ids))
        return F.linear(self.mix(self.mix(x)), self.embedding.weight)


class Shortcuts(nn.Module):
    """Blocks whose shortcut is a module that does nothing, as in many residual nets."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.shortcuts = nn.ModuleList(nn.Identity() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv, shortcut in zip(self.norms, self.convs, self.shortcuts, strict=True):
            y = torch.relu(norm(conv(x)))
            kept = shortcut(x)
            x = y + kept
        return x


class Spectral(nn.Module):
    """Weights divided by what each step estimates anew; one layer is called twice."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.convs = nn.ModuleList(
            spectral_norm(nn.Conv2d(width, width, 3, padding=1)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv in (*self.convs, self.convs[0]):
            x = torch.tanh(conv(x))
        return x


class Counting(nn.Module):
    """Each layer counts its steps, in a tensor that it computes with."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            layer.register_buffer("steps", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.steps += 1
            x = torch.sin(layer(x) * layer.steps).exp()
        return x


class Stages(nn.Module):
    """Stages of one kind, of which a plan of modules recomputes some."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [stage(x) for stage in self.stages]
        found = [o if isinstance(o, Tensor) else o["hidden"] for o in outputs]
        return torch.stack([part.flatten(1) for part in found]).sum(0)


PLANNED = {
    "residual": (Residual, "4x3x16x16"),
    "attention": (Attention, "4x12x16"),
    "dense": (Dense, "4x3x16x16"),
    "unet": (UNet, "2x3x32x32"),
    "tied": (Tied, "4x7:int64"),
    "shortcuts": (Shortcuts, "4x3x16x16"),
    "spectral": (Spectral, "4x3x16x16"),
    "counting": (Counting, "64x16"),
}
"""By name, a model and its input."""

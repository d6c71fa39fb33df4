"""Two networks whose activations are most of the memory, for plans of what to compute again.

fxmem analyze examples/planner_nets.py:DeepResNet --input 32x3x32x32 --device cpu
fxmem analyze examples/planner_nets.py:PlainGPT --input 8x256:int64 --device cpu
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """One convolution, normalised and rectified, and a shortcut around it.

    Args:
        channels_in: Channels of its input.
        channels: Channels of its output.
        stride: By how much it shrinks the image.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + self.shortcut(x)


class Scores(nn.Module):
    """The mean over the image, and class scores of it."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.mean(x, dim=(2, 3)))


class DeepResNet(nn.Module):
    """Small images to class scores, by a stem, residual blocks and a head.

    Args:
        depths: Blocks in each stage; each but the first begins with half the image's size.
        width: Channels of the first stage; each later one has twice as many.
        classes: How many scores.
    """

    def __init__(
        self, depths: tuple[int, ...] = (6, 6, 6), width: int = 16, classes: int = 10
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList()
        channels_in = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Residual(channels_in, channels, stride))
                channels_in = channels
        self.head = Scores(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Embedded(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]


class Block(nn.Module):
    """Attention that is written out, then a two-layer network, both with a shortcut.

    Args:
        width: Numbers per token.
        heads: Heads of the attention; they divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.project_out((weights @ value).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class PlainGPT(nn.Module):
    """A decoder-only transformer that keeps the weights of its attention.

    Args:
        layers: How many blocks.
        width: Numbers per token.
        heads: Heads of each attention; they divide the width.
        vocabulary: How many tokens there are.
        context: The longest input.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 256,
        context: int = 256,
    ) -> None:
        super().__init__()
        self.stem = Embedded(vocabulary, context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

"""A U-Net: images to a map of scores of the same size.

fxmem analyze examples/unet.py:UNet --input 4x3x256x256 --optimizer sgd
fxmem analyze 'examples/unet.py:UNet(depth=5)' --input 1x3x512x512 --mode infer
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DoubleConvolution(nn.Module):
    """Two convolutions, each normalised and rectified."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down to small images with many channels and up again, with shortcuts across.

    Args:
        depth: How many times the image is halved; its size is a multiple of 2**depth.
        width: Channels at full size.
        classes: Scores for each pixel.
    """

    def __init__(self, depth: int = 4, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(DoubleConvolution, [3, *channels], channels))
        pairs = list(zip(channels[1:], channels, strict=False))[::-1]
        self.grow = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs])
        self.up = nn.ModuleList([DoubleConvolution(2 * b, b) for _, b in pairs])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.down[0](images)
        shortcuts = []
        for down in self.down[1:]:
            shortcuts.append(x)
            x = down(F.max_pool2d(x, 2))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([shortcuts.pop(), grow(x)], dim=1))
        return self.head(x)

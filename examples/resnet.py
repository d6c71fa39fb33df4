"""ResNet-18 and ResNet-50 in plain PyTorch.

fxmem analyze examples/resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
fxmem analyze 'examples/resnet.py:ResNet50(classes=10)' --input 8x3x224x224
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def convolve(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (over the stride), and its normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class Block(nn.Module):
    """Convolutions and a shortcut around them.

    Args:
        channels_in: Channels of its input.
        channels: Channels inside.
        stride: By how much it shrinks the image.
        bottleneck: Three convolutions that end in four times the channels, instead of two.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        channels_out = 4 * channels if bottleneck else channels
        if bottleneck:
            self.layers = nn.ModuleList(
                [
                    convolve(channels_in, channels, 1),
                    convolve(channels, channels, 3, stride),
                    convolve(channels, channels_out, 1),
                ]
            )
        else:
            self.layers = nn.ModuleList(
                [convolve(channels_in, channels, 3, stride), convolve(channels, channels, 3)]
            )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else convolve(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = F.relu(layer(y))
        return F.relu(self.layers[-1](y) + self.shortcut(x))


class ResNet(nn.Module):
    """Images to class scores.

    Args:
        depths: Blocks in each of the four stages.
        bottleneck: The kind of block.
        classes: How many scores.
    """

    def __init__(self, depths: tuple[int, ...], bottleneck: bool, classes: int) -> None:
        super().__init__()
        self.stem = convolve(3, 64, 7, stride=2)
        blocks: list[nn.Module] = []
        channels_in = 64
        for stage, depth in enumerate(depths):
            channels = 64 * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(channels_in, channels, stride, bottleneck))
                channels_in = 4 * channels if bottleneck else channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.blocks(x)
        return self.head(torch.mean(x, dim=(2, 3)))


def ResNet18(classes: int = 1000) -> ResNet:
    return ResNet((2, 2, 2, 2), bottleneck=False, classes=classes)


def ResNet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes)

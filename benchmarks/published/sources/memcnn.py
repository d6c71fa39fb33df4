"""Residual networks with normalisation first, on images of 32x32, trained by SGD with momentum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after
from fxmem.graph import Phase

CHANNELS, STRIDES, CLASSES = (16, 32, 64), (1, 2, 2), 10


class Branch(nn.Module):
    """Two or three convolutions, each after BatchNorm and ReLU; the very first has neither."""

    def __init__(self, inputs: int, width: int, stride: int, plain: bool, narrow: bool) -> None:
        super().__init__()
        self.narrow = narrow
        self.bn1 = None if plain else nn.BatchNorm2d(inputs)
        if narrow:
            self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(width)
            self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        else:
            self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps."""
        if self.bn1 is not None:
            x = self.bn1(x)
            x = self.relu(x)
        x = self.conv1(x)
        x = self.bn2(x)
        x = self.relu(x)
        x = self.conv2(x)
        if self.narrow:
            x = self.bn3(x)
            x = self.relu(x)
            x = self.conv3(x)
        return x


class Block(nn.Module):
    """A branch, added to what came in."""

    def __init__(self, inputs: int, width: int, stride: int, plain: bool, narrow: bool) -> None:
        super().__init__()
        outputs = width * 4 if narrow else width
        self.branch = Branch(inputs, width, stride, plain, narrow)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps."""
        residual = x
        out: Tensor = self.branch(x)
        if self.downsample is not None:
            residual = self.downsample(x)
        out += residual
        return out


class ResNet(nn.Module):
    """Three stages of blocks."""

    def __init__(self, layers: Sequence[int], narrow: bool) -> None:
        super().__init__()
        inputs = CHANNELS[0]
        self.conv1 = nn.Conv2d(3, inputs, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU()
        blocks: list[nn.Module] = []
        for count, width, stride in zip(layers, CHANNELS, STRIDES, strict=True):
            for index in range(count):
                blocks.append(
                    Block(inputs, width, 1 if index else stride, not blocks, narrow),
                )
                inputs = width * 4 if narrow else width
        self.blocks = nn.Sequential(*blocks)
        self.bn_final = nn.BatchNorm2d(inputs)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """From images to logits."""
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.blocks(x)
        x = self.bn_final(x)
        x = self.relu(x)
        x = self.avgpool(x)
        x = x.view(x.size(0), -1)
        return self.fc(x)


def cross_entropy(logits: Tensor) -> Tensor:
    """The loss: of one-hot labels, written out."""
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    one_hot = torch.zeros_like(logits)
    one_hot.scatter_(1, labels.view(-1, 1), 1)
    return torch.mean(-one_hot * torch.log(torch.softmax(logits, 1))) * logits.shape[1]


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes after forward and loss, and after the step; zero_grad comes between."""
    with torch.device("meta"):
        network = ResNet(case.config["layers"], case.config["bottleneck"])
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0", DISABLE_ADDMM_CUDA_LT="1"):
        analysis = fxmem.analyze(
            network,
            (fxmem.TensorSpec((case.config["batch"], 3, 32, 32), "float32"),),
            gpu=case.gpu,
            optimizer="sgd-momentum",
            loss=cross_entropy,
            set_to_none=False,
            hold_outputs=True,
            alloc_conf="",
        )
    model = sum(
        -(-tensor.nbytes // 512) * 512 for tensor in (*network.parameters(), *network.buffers())
    )
    after_forward = find_allocated_after(analysis, (Phase.FORWARD, Phase.LOSS))
    return {
        "allocated by model": model,
        "allocated by forward": after_forward - model,
        "allocated after forward": after_forward,
        "allocated after step": find_allocated_after(analysis),
    }

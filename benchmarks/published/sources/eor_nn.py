"""A convolutional regressor whose image is optimised: Adam on the pixels, the weights at rest.

Three stages of convolution, ReLU, batch normalization and pooling, then dropout and linear layers.
Every allocation of ten steps was recorded, with those of autograd's anomaly mode among them, which
is no part of the prediction.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.cuda_trace import Change
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks
from benchmarks.published.traces import list_predicted
from fxmem.analysis import Analysis

CHANNELS = (30, 16, 32, 64)
FEATURES = (64, 200, 100, 20)
SIDE = 256


class Regressor(nn.Module):
    """From an image to a number."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(CHANNELS))
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, padding="same") for i, o in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o in pairs)
        self.pool, self.relu, self.dropout = nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.2)
        self.pool_all = nn.MaxPool2d(SIDE // 2 ** len(pairs))
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(FEATURES))
        self.out = nn.Linear(FEATURES[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        """From (1, 30, 256, 256) to (1, 1)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(self.relu(convolution(x)))
            x = self.pool(x)
        x = self.pool_all(x)
        x = x.flatten(1)
        for linear in self.linears:
            x = self.relu(linear(self.dropout(x)))
        return self.out(x)


class Counterfactual(nn.Module):
    """An image near another whose number is far from the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Regressor().requires_grad_(False)
        self.image = nn.Parameter(torch.zeros(1, CHANNELS[0], SIDE, SIDE))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The loss, its two parts and the number of the image."""
        number = self.net(self.image)
        loss = self._compare_images(x) - (number - y) ** 2
        near = self._compare_images(x).detach()
        far = -((number - y) ** 2).detach()
        return loss, near, far, number

    def _compare_images(self, x: Tensor) -> Tensor:
        return ((self.image - x) ** 2).mean()


def analyze(case: Case) -> Analysis:
    """The analysis of a step."""
    with torch.device("meta"):
        model = Counterfactual()
    return fxmem.analyze(
        model,
        (fxmem.TensorSpec((1, CHANNELS[0], SIDE, SIDE)), fxmem.TensorSpec((1, 1))),
        gpu=case.gpu,
        optimizer="adam",
        loss=lambda output: output[0],
        hold_outputs=True,
        alloc_conf="",
    )


def predict(case: Case) -> dict[str, int]:
    """Peaks of a later step."""
    return list_peaks(analyze(case))


def list_changes(case: Case) -> list[Change]:
    """Allocations and frees of the second step."""
    return list_predicted(analyze(case).graph)

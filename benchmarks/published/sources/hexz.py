"""A residual network for a board game, its forward in training mode, with and without autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

BATCH, PLANES, HEIGHT, WIDTH = 512, 11, 11, 10
FILTERS, BLOCKS = 128, 10
CELLS = HEIGHT * WIDTH


def _convolve(inputs: int, outputs: int, size: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding="same" if size > 1 else 0, bias=False)


class Residual(nn.Module):
    """Two convolutions, each normalised, and the sum with what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _convolve(FILTERS, FILTERS, 3)
        self.norm1 = nn.BatchNorm2d(FILTERS)
        self.relu = nn.ReLU()
        self.conv2 = _convolve(FILTERS, FILTERS, 3)
        self.norm2 = nn.BatchNorm2d(FILTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        residual = x
        x = self.conv1(x)
        x = self.norm1(x)
        x = self.relu(x)
        x = self.conv2(x)
        x = self.norm2(x)
        x += residual
        return self.relu(x)


class HexzNet(nn.Module):
    """Ten blocks, a head for moves and one for the value of a position."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(_convolve(PLANES, FILTERS, 3), nn.BatchNorm2d(FILTERS), nn.ReLU())
        self.blocks = nn.ModuleList([stem, *(Residual() for _ in range(BLOCKS - 1))])
        self.policy = nn.Sequential(
            _convolve(FILTERS, 2, 1),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * CELLS, 2 * CELLS),
        )
        self.value = nn.Sequential(
            _convolve(FILTERS, 1, 1),
            nn.BatchNorm2d(1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CELLS, CELLS),
            nn.ReLU(),
            nn.Linear(CELLS, 1),
        )

    def forward(self, boards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """From boards and the moves that are allowed to logits of moves, and values."""
        x = boards
        for block in self.blocks:
            x = block(x)
        policy = self.policy(x)
        policy = policy.where(mask.flatten(1), torch.full_like(policy, -1e3))
        return policy, torch.tanh(self.value(x))


class Loop(nn.Module):
    """Forwards in training mode, with gradients, whose outputs are dropped at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = HexzNet()

    def train(self, mode: bool = True) -> Loop:
        """Stays in training mode."""
        return super().train(True)

    def forward(self, boards: Tensor, mask: Tensor) -> None:
        """Two of the hundred forwards."""
        with torch.enable_grad():
            for _ in range(2):
                self.net(boards, mask)


def predict(case: Case) -> dict[str, int]:
    """The peak of forwards; nothing runs backward.

    The cuBLAS workspace of a run before in the same process is that of the next.
    """
    analysis = fxmem.analyze(
        f"{__name__}:Loop",
        (
            fxmem.TensorSpec((BATCH, PLANES, HEIGHT, WIDTH), "float32"),
            fxmem.TensorSpec((BATCH, 2, HEIGHT, WIDTH), "bool"),
        ),
        mode="infer",
        gpu=case.gpu,
        autocast=case.config["autocast"],
        alloc_conf="",
    )
    return {"allocated": list_peaks(analysis)["allocated"]}

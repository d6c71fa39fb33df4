"""The recipe for mixed precision of PyTorch's tutorials, and a network for MNIST, on a T4."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

WIDTH, LAYERS = 4096, 3
BATCHES = 50  # of inputs and of targets, all on the GPU from the start


def build_recipe() -> nn.Sequential:
    """Linear layers of one width with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class DigitNet(nn.Module):
    """Two convolutions, two linear layers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.4)
        self.dropout2 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """From images of 28x28 to logarithms of probabilities."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = functional.relu(self.fc1(x))
        x = self.dropout2(x)
        return functional.log_softmax(self.fc2(x), dim=1)


def predict(case: Case) -> dict[str, int]:
    """The peak of training; both loops are at module level, and zero gradients in place."""
    recipe = case.config["model"] == "recipe"
    batch = case.config["batch"]
    shape = (batch, WIDTH) if recipe else (batch, 1, 28, 28)
    analysis = fxmem.analyze(
        f"{__name__}:{'build_recipe' if recipe else 'DigitNet'}",
        (fxmem.TensorSpec(shape, "float32"),),
        gpu=case.gpu,
        autocast=case.config["autocast"],
        optimizer="sgd" if recipe else torch.optim.Adadelta,
        loss="mse" if recipe else "cross_entropy",
        set_to_none=False,
        hold_outputs=True,
        alloc_conf="",
    )
    waiting = 2 * (BATCHES - 1) * batch * WIDTH * 4 if recipe else 0
    return {"allocated": list_peaks(analysis)["allocated"] + waiting}

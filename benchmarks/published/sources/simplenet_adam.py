"""Twenty linear layers with ReLU under three implementations of Adam, in one process."""

from __future__ import annotations

from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

WIDTH, LAYERS, BATCH = 200, 20, 64


class SimpleNet(nn.Module):
    """Linear layers of one width, a ReLU after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """From features to logits of the same shape."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def predict(case: Case) -> dict[str, int]:
    """The peak of the process: earlier networks stay, with gradients and optimizer state."""
    analysis = fxmem.analyze(
        f"{__name__}:SimpleNet",
        (fxmem.TensorSpec((BATCH, WIDTH), "float32"),),
        gpu=case.gpu,
        optimizer=case.config["optimizer"],
        loss="cross_entropy",
        alloc_conf="",
    )
    kept = analysis.parameter_bytes + analysis.gradient_bytes + analysis.optimizer_state_bytes
    return {"allocated": list_peaks(analysis)["allocated"] + case.config["networks_before"] * kept}

"""One or two linear layers, and an LSTM, as pytorch_memlab's reporter saw them."""

from __future__ import annotations

import os
from unittest import mock

from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after
from fxmem.graph import Phase

WIDTH = 1024


class Linear(nn.Linear):
    """The mean of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """From features to a scalar."""
        return super().forward(x).mean()


class Tied(nn.Sequential):
    """The mean after two linear layers that share their weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self[1].weight = self[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """From features to a scalar."""
        out: Tensor = super().forward(x)
        return out.mean()


class Product(Linear):
    """The mean of a linear layer's output for a product that nobody names."""

    def forward(self, x: Tensor) -> Tensor:
        """From features to a scalar."""
        return super().forward(x * (x + 2))


class Lstm(nn.Module):
    """An LSTM whose loss is the mean of its output; output and states are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """From a sequence to its output, and the last states."""
        out, states = self.lstm(x)
        return out, states


def average(output: Tensor | tuple[Tensor, object]) -> Tensor:
    """The loss: a scalar as it is, else the mean of an output."""
    return output[0].mean() if isinstance(output, tuple) else output


MODELS = {"linear": "Linear", "tied": "Tied", "product": "Product", "lstm": "Lstm"}


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes at the moments of the reports, without cuBLAS's workspaces."""
    batch, model = case.config["batch"], case.config["model"]
    shape = (batch, batch, WIDTH) if model == "lstm" else (batch, WIDTH)
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0", DISABLE_ADDMM_CUDA_LT="1"):
        analysis = fxmem.analyze(
            f"{__name__}:{MODELS[model]}",
            (fxmem.TensorSpec(shape, "float32"),),
            gpu=case.gpu,
            loss=average,
            alloc_conf="",
        )
    forward = (Phase.FORWARD, Phase.LOSS)
    return {
        "allocated before": find_allocated_after(analysis, ()),
        "allocated after forward": find_allocated_after(analysis, forward),
        "allocated after backward": find_allocated_after(analysis),
    }

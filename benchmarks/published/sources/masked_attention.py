"""Attention written out with a causal mask, without heads, by width and length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after
from benchmarks.published.sources.assignment2_systems import attend

BATCH = 8


class Attention(nn.Module):
    """Attention whose queries, keys and values are what is differentiated by."""

    mask: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(BATCH, length, width))
        self.k = nn.Parameter(torch.empty(BATCH, length, width))
        self.v = nn.Parameter(torch.empty(BATCH, length, width))
        self.register_buffer("mask", torch.empty(length, length, dtype=torch.bool))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output whose loss is differentiated, and one that nobody differentiates."""
        differentiated = attend(self.q, self.k, self.v, self.mask)
        loss = differentiated.sum()
        del differentiated
        return loss, attend(self.q, self.k, self.v, self.mask)


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes after forwards that hold output, and after steps that keep gradients.

    The last loss of those steps is there too; its graph is not.
    """
    with torch.device("meta"):
        attention = Attention(case.config["length"], case.config["width"])
    analysis = fxmem.analyze(
        attention,
        (),
        gpu=case.gpu,
        loss=lambda outputs: outputs[0],
        set_to_none=False,
        hold_outputs=True,
        alloc_conf="",
    )
    return {"allocated after forward": find_allocated_after(analysis)}

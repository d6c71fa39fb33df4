"""A language model of GPT-2 XL's size in plain PyTorch: forwards with gradients, no backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks
from benchmarks.published.sources.assignment2_systems import Attention, Model, Rotary, attend

BATCH, WIDTH, LAYERS, HEADS, INNER = 4, 1600, 48, 25, 6400


class IndexedRotary(Rotary):
    """Rotary embeddings, whose sines and cosines are gathered by position."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """From (..., sequence, width) to that shape."""
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, positions].unbind(0)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.concat((first, second), dim=-1)


class IndexedAttention(Attention):
    """Causal attention, whose positions are there from before the rotation to the end."""

    rotary: IndexedRotary

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, sequence, width) to that shape."""
        length = x.size(-2)
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in (query, key, value)
        )
        positions = torch.arange(length, device=x.device)
        query = self.rotary.rotate(query, positions)
        key = self.rotary.rotate(key, positions)
        steps = torch.arange(length, device=x.device)
        mask = steps[None, None, :, None] >= steps[None, None, None, :]
        attended = attend(query, key, value, mask)
        attended = attended.transpose(-2, -3).flatten(-2).contiguous()
        return self.output(attended)


class Forwards(nn.Module):
    """Two of the forwards, each of whose outputs is dropped; the targets are there, unused.

    Each has an autocast of its own, with which the weights end that it has cast.
    """

    def __init__(self, context: int, autocast: bool) -> None:
        super().__init__()
        self.autocast = autocast
        self.model = Model(context, WIDTH, LAYERS, HEADS, INNER)
        rotary = IndexedRotary(context, WIDTH // HEADS)
        for layer in self.model.layers:
            layer.attention = IndexedAttention(WIDTH, HEADS, rotary)

    def forward(self, ids: Tensor, targets: Tensor) -> None:
        """The logits are nobody's."""
        with torch.enable_grad():
            for _ in range(2):
                with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                    self.model(ids)


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes before a forward, and the peaks."""
    context = case.config["context"]
    batch = fxmem.TensorSpec((BATCH, context), "int64")
    with torch.device("meta"):
        forwards = Forwards(context, case.config["autocast"] is not None)
    analysis = fxmem.analyze(forwards, (batch, batch), mode="infer", gpu=case.gpu, alloc_conf="")
    return list_peaks(analysis) | {"allocated before": find_allocated_after(analysis)}

"""Attention written out, without heads or a mask, by width and length, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, find_peak_in, list_peaks
from fxmem.analysis import Analysis
from fxmem.graph import Phase

BATCH = 8


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, written out; the shifted scores live as long as their name."""
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    exp = torch.exp(shifted)
    return exp / torch.sum(exp, dim=-1, keepdim=True)


class Attention(nn.Module):
    """Attention whose queries, keys and values are what is differentiated by."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(BATCH, length, width))
        self.k = nn.Parameter(torch.empty(BATCH, length, width))
        self.v = nn.Parameter(torch.empty(BATCH, length, width))

    def attend(self) -> Tensor:
        """Scores, their softmax, and the sums of values."""
        scores = torch.einsum("...ad,...bd->...ab", self.q, self.k) / self.q.shape[-1] ** 0.5
        return torch.einsum("...ab,...bd->...ad", softmax(scores), self.v)

    def forward(self) -> Tensor:
        """One call."""
        return self.attend()


class WithSecondGraph(Attention):
    """A call whose backward runs, while the output and the loss of another are held."""

    def forward(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The output whose loss is differentiated, and what is held."""
        held = self.attend()
        held_loss = held.sum()
        return self.attend(), held, held_loss


def add(output: Tensor) -> Tensor:
    """The loss."""
    return output.sum()


def add_first(outputs: tuple[Tensor, ...]) -> Tensor:
    """The loss of the first output."""
    return outputs[0].sum()


def predict(case: Case) -> dict[str, int]:
    """Before, in and after a forward, and in steps while another output holds its graph."""
    length, width = case.config["length"], case.config["width"]

    def analyze(kind: type[Attention], held: bool) -> Analysis:
        with torch.device("meta"):
            model = kind(length, width)
        return fxmem.analyze(
            model,
            (),
            gpu=case.gpu,
            loss=add if kind is Attention else add_first,
            hold_outputs=held,
            alloc_conf="",
        )

    analysis = analyze(Attention, True)
    return {
        "allocated before": find_allocated_after(analysis, ()),
        "allocated in forward": find_peak_in(analysis, (Phase.FORWARD, Phase.LOSS)),
        "allocated after forward": find_allocated_after(analysis, (Phase.FORWARD, Phase.LOSS)),
        "allocated with a second graph": list_peaks(analyze(WithSecondGraph, False))["allocated"],
    }

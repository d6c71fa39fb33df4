"""Attention of several heads written out, without an output projection, in a loop of steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

BATCH, LENGTH = 64, 256


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension, written out; its parts live as long as their names."""
    largest, _ = torch.max(x, dim=-1, keepdim=True)
    shifted = x - largest
    exponentials = torch.exp(shifted)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention; the width whose root divides is made on the GPU."""
    width = torch.tensor(key.shape[-1], device=query.device)
    scores = torch.einsum("...kd,...qd->...qk", key, query) / torch.sqrt(width)
    del width
    scores = scores.masked_fill(~mask, -1e9)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Steps(nn.Module):
    """Steps without an optimizer, each on an input of its own that is differentiated by too.

    The output of a step lives until the next has its own, and with it, by its graph, the input
    and the gradient of that.
    """

    def __init__(self, heads: int, width: int, warmup_steps: int) -> None:
        super().__init__()
        self.heads, self.width, self.warmup_steps = heads, width, warmup_steps
        self.query, self.key, self.value, self.output = (
            nn.Parameter(torch.empty(width, width)) for _ in range(4)
        )

    def project(self, weight: Tensor, x: Tensor) -> Tensor:
        """From (batch, sequence, width) to (batch, heads, sequence, width of a head)."""
        return torch.einsum("hdm,...sm->...hsd", weight.unflatten(0, (self.heads, -1)), x)

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attention from input to output; nobody needs the positions."""
        query, key, value = (self.project(w, x) for w in (self.query, self.key, self.value))
        mask = ~torch.empty(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
        return attend(query, key, value, mask)

    def forward(self) -> None:
        """A few steps; those to warm up keep their gradients."""
        with torch.enable_grad():
            for step in range(self.warmup_steps + 2):
                if step >= self.warmup_steps:
                    for parameter in self.parameters():
                        parameter.grad = None
                x = torch.randn(
                    BATCH, LENGTH, self.width, device=self.query.device, requires_grad=True
                )
                y = self.attend(x, torch.arange(LENGTH, device=x.device))
                y.sum().backward()


def predict(case: Case) -> dict[str, int]:
    """The most requested in a step after the warm-up, and reserved by all of them."""

    def find_peaks(warmup_steps: int) -> dict[str, int]:
        with torch.device("meta"):
            steps = Steps(case.config["heads"], case.config["width"], warmup_steps)
        return list_peaks(fxmem.analyze(steps, (), mode="infer", gpu=case.gpu, alloc_conf=""))

    return {
        "requested": find_peaks(warmup_steps=0)["requested"],
        "reserved": find_peaks(warmup_steps=3)["reserved"],
    }

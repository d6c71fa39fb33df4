"""A language model in plain PyTorch, as students of a course profiled it: inference and training.

Einstein sums for every product, RMSNorm in float32, rotary embeddings from a table, attention
written out, SwiGLU, a cross entropy of its own, and an AdamW written out of place. All memory of
these processes was recorded, event by event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.cuda_trace import Change
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks
from benchmarks.published.traces import list_predicted
from fxmem.analysis import Analysis

VOCABULARY = 10_000
WARMUP_STEPS = 5


class Linear(nn.Module):
    """A product with a weight of shape (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """From (..., inputs) to (..., outputs)."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table, by index."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        """From (...) to (..., width)."""
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    """Root mean square normalization in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps shape and type."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotary embeddings, whose sines and cosines are in a table."""

    table: Tensor

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, context, width // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (..., sequence, width) to that shape."""
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Exponentials of what is left of the maximum, over their sum."""
    x = x - torch.max(x, dim=dim, keepdim=True)[0]
    exponentials = torch.exp(x)
    return exponentials / torch.sum(exponentials, dim=dim, keepdim=True)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of the softmax."""
    largest = torch.max(x, dim=dim, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=dim, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets."""
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention, score by score."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.output = Linear(width, width)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, sequence, width) to that shape."""
        length = x.size(-2)
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in (query, key, value)
        )
        query = self.rotary(query)
        key = self.rotary(key)
        steps = torch.arange(length, device=x.device)
        mask = steps[:, None] >= steps[None, :]
        mask = mask[None, ...]
        attended = attend(query, key, value, mask)
        attended = attended.transpose(-2, -3).flatten(-2).contiguous()
        return self.output(attended)


class SwiGLU(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down = Linear(width, inner), Linear(inner, width)
        self.up = Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        return self.down(_silu(self.gate(x)) * self.up(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Attention and feed-forward, each after a normalization."""

    def __init__(self, width: int, heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(width, heads, rotary)
        self.feed_forward = SwiGLU(width, inner)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        attended = self.attention(self.norm1(x))
        between = x + attended
        fed = self.feed_forward(self.norm2(between))
        return between + fed


class Model(nn.Module):
    """The language model; its head has a weight of its own."""

    def __init__(self, context: int, width: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, width)
        rotary = Rotary(context, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, rotary) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """From (batch, sequence) to logits of (batch, sequence, vocabulary)."""
        embedded = self.embedding(ids)
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


class Inference(nn.Module):
    """A forward whose output is dropped; batches of the steps before are still there."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.model = Model(**sizes)

    def forward(self, ids: Tensor, *others: Tensor) -> None:
        """The logits are nobody's."""
        self.model(ids)


class Training(nn.Module):
    """A forward with its loss; batches and targets of the steps before are still there."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.model = Model(**sizes)

    def forward(self, ids: Tensor, targets: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and loss."""
        logits = self.model(ids)
        return logits, cross_entropy(logits, targets)


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, each moment made anew from the one before."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates each parameter by itself."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad.data
                parameter.data -= 1e-5 * parameter.data
                first = state.get("first", torch.zeros_like(grad))
                second = state.get("second", torch.zeros_like(grad))
                state["first"] = 0.9 * first + 0.1 * grad
                state["second"] = 0.999 * second + 0.001 * torch.square(grad)
                parameter.data -= 1e-3 * state["first"] / (torch.sqrt(state["second"]) + 1e-8)


def analyze(case: Case) -> Analysis:
    """The analysis of a case's step."""
    config = case.config
    sizes = {key: config[key] for key in ("context", "width", "layers", "heads", "inner")}
    batch = fxmem.TensorSpec((config["batch"], config["context"]), "int64")
    before = fxmem.TensorSpec((WARMUP_STEPS, config["batch"], config["context"]), "int64")
    common: dict[str, Any] = {"gpu": case.gpu, "autocast": config["autocast"], "alloc_conf": ""}
    if config["mode"] == "infer":
        with torch.device("meta"):
            model = Inference(**sizes)
        args = (batch, before) if config["batches_before"] else (batch,)
        inference_mode = config["inference_mode"]
        return fxmem.analyze(model, args, mode="infer", inference_mode=inference_mode, **common)
    with torch.device("meta"):
        training = Training(**sizes)
    return fxmem.analyze(
        training,
        (batch, batch, before, before),
        optimizer=AdamW,
        loss=lambda output: output[1],
        **common,
    )


def predict(case: Case) -> dict[str, int]:
    """Peaks of the step after the warm-up, or of all steps."""
    return list_peaks(analyze(case))


def list_changes(case: Case) -> list[Change]:
    """Allocations and frees of the window that was recorded: a step, or all from the first on."""
    graph = analyze(case).graph
    forwards = case.config.get("forwards")
    if forwards is None:
        return list_predicted(graph)
    return list_predicted(graph, first=True) + (forwards - 1) * list_predicted(graph)

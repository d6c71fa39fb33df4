"""A model of two blocks, and plans of whole modules for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from fxmem.planning.plan import Plan, Segment


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """One block."""
        return x + scale * torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x, scale=scale))


def make_plan(*fqns: str, random: bool = False, norms: tuple[str, ...] = ()) -> Plan:
    segments = tuple(Segment("a", "b", 2, fqn=fqn, random=random, norms=norms) for fqn in fqns)
    return Plan("0123", 200, 100, segments=segments, style="modules")


def wrap(model: nn.Module, *fqns: str) -> Any:
    norms = tuple(f"{fqn}.norm" for fqn in fqns)
    return fxmem.apply(model, make_plan(*fqns, norms=norms))


def count_saved(run: Callable[[], Any]) -> int:
    """Counts the tensors that autograd keeps."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return len(kept)

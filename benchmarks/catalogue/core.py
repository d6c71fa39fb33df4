"""Cases of functions: their arguments are parameters and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.cases import Case, Spec

MATRIX = (256, 1024)
SQUARE = (4, 128, 128)
SIGNAL = (4, 16, 512)
IMAGE = (2, 16, 48, 48)
VOLUME = (2, 8, 12, 12, 12)

Function = Callable[..., Any]


class Apply(nn.Module):
    """Calls a function of parameters and inputs."""

    def __init__(self, function: Function, sizes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.function = function
        self.leaves = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Calls it: parameters first."""
        return self.function(*self.leaves, *inputs)


FUNCTIONS: dict[str, tuple[Function, tuple[Any, ...]]] = {}


def add(group: tuple[Any, ...], **functions: Function) -> None:
    """Adds functions of the same arguments: sizes are parameters, specifications are inputs."""
    for name, function in functions.items():
        assert name not in FUNCTIONS, name
        FUNCTIONS[name] = (function, group)


def make_case(name: str) -> Case:
    """The case of one function."""
    function, group = FUNCTIONS[name]
    sizes = tuple(item for item in group if isinstance(item, tuple))
    specs = tuple(item for item in group if isinstance(item, Spec))
    return Case(name, lambda: Apply(function, sizes), specs)

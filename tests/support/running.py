"""Modules whose forward a test gives, with layers that it may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Call(nn.Module):
    """Calls a function of the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


class Runs(nn.Module):
    """Runs a function of itself and its inputs; holds modules and tensors by their names."""

    def __init__(self, run: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Running(nn.Module):
    """Runs a function of itself and its input."""

    def __init__(
        self, run: Callable[[Any, Tensor], object], width: int = 8, child: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.run = run
        self.child = child
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.recurrent = nn.GRU(width, width)
        self.same, self.drop = nn.Identity(), nn.Dropout(0.0)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.register_buffer("steps", torch.zeros(width))

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)

"""A row of the table, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.cuda.gpu import Gpu

H100 = Gpu((9, 0))


@dataclass(frozen=True, slots=True)
class Row:
    """An operator and what it saves.

    Attributes:
        name: Of the row.
        run: The model of the step, a module or a function of the inputs.
        inputs: Of the step.
        saved: Storages: ``input 0`` counts the inputs, ``weight`` is a parameter or buffer,
            ``4x6:float32`` is what the step made itself, ``:float32`` with no size a scalar.
            ``=N`` says the bytes of the storage where they are not those of that tensor.
        mode: As in ``analyze``.
        gpu: That is meant.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    saved: tuple[str, ...]
    mode: str = "train"
    gpu: Gpu = Gpu()  # noqa: RUF009 - frozen


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input whose gradient is asked for."""
    return torch.zeros(sizes, dtype=dtype, requires_grad=True)


def index(*sizes: int) -> Tensor:
    """An input of indices."""
    return torch.zeros(sizes, dtype=torch.int64)

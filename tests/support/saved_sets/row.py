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
        saved: Storages: ``in0`` counts the inputs, ``weight`` is a parameter or buffer, ``4x6``
            and ``4x6:int64`` are what the step made itself, ``:float32`` with no size a scalar.
        mode: As in ``analyze``.
        gpu: That is meant.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    saved: tuple[str, ...]
    mode: str = "train"
    gpu: Gpu = Gpu()  # noqa: RUF009 - frozen


def row(name: str, run: Callable[..., Any], inputs: str, saved: str = "", **settings: Any) -> Row:
    """A row whose inputs and saved storages are written with blanks between them."""
    return Row(name, run, tuple(map(make_input, inputs.split())), tuple(saved.split()), **settings)


def make_input(text: str) -> Tensor:
    """Zeros of a size: ``4x6`` and ``4x6:bfloat16`` ask for a gradient, ``4x6:constant`` does not.

    ``:int64`` and ``:bool`` are indices and masks; ``:last`` is in channels last.
    """
    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", torch.float32)
    x = torch.zeros([int(size) for size in shape.split("x")], dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if kind == "last" else x
    return x.requires_grad_(dtype.is_floating_point and kind != "constant")

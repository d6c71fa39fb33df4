"""The value that a fake tensor carries beside it, where one is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

MAX_ELEMENTS = 1 << 16
"""Larger tensors get no value: computing them would take time and memory."""

_VALUE = "_fxmem_value"


@dataclass(slots=True)
class Memory:
    """Memory that values share; no longer known once the step overwrites it."""

    known: bool = True


@dataclass(frozen=True, slots=True)
class Value:
    """A real tensor, and the memory that it shares with the values of its views.

    Attributes:
        real: The tensor.
        memory: What overwriting makes unknown.
        drawn: Whether it came of a random number.
    """

    real: torch.Tensor
    memory: Memory
    drawn: bool = False


def attach_value(
    fake: torch.Tensor, real: torch.Tensor, memory: Memory | None = None, *, drawn: bool = False
) -> None:
    """Lets a fake tensor carry a real one, which nothing else may change.

    Args:
        fake: The fake tensor.
        real: Its value.
        memory: That of the value it is a view of; its own if None.
        drawn: Whether it came of a random number.
    """
    fake.__dict__[_VALUE] = Value(real, memory or Memory(), drawn)


def find_attached(tensor: torch.Tensor) -> Value | None:
    """What was attached to a tensor, whether still known or not."""
    value: Value | None = tensor.__dict__.get(_VALUE)
    return value


def find_known(tensor: torch.Tensor) -> Value | None:
    """The value of a tensor and its memory; None if it is not known."""
    value = find_attached(tensor)
    if value is not None:
        return value if value.memory.known else None
    if isinstance(tensor, FakeTensor):
        # What torch.tensor(...) made; the fake mode itself forgets it when it is overwritten.
        return None if tensor.constant is None else Value(tensor.constant, Memory())
    if type(tensor) is torch.Tensor and tensor.numel() <= MAX_ELEMENTS:  # a real one, mixed in
        return Value(tensor, Memory())
    return None


def find_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor beside a fake one; None if its value is not known."""
    value = find_known(tensor)
    return value.real if value else None

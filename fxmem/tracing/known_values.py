"""The value that a fake tensor carries beside it, where one is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

MAX_ELEMENTS = 1 << 16
"""Larger tensors get no value: computing them would take time and memory."""

_VALUE = "_fxmem_value"
_HELD = "_fxmem_held"


@dataclass(slots=True)
class Memory:
    """Memory that values share.

    Attributes:
        known: No longer so once the step overwrites it with what is not known.
        held: Whether it came of a tensor that was there before the step: of an input, or of what
            the model holds. Other steps may have others.
    """

    known: bool = True
    held: bool = False


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


def remember_constant(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the value of a small real tensor that the user's code holds."""
    if real.device.type == "cpu" and real.numel() <= MAX_ELEMENTS:
        with _disable_current_modes():
            attach_value(fake, real.detach().clone(), Memory(held=True))


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
        if tensor.constant is None:
            return None
        return Value(tensor.constant, Memory(held=_HELD in tensor.__dict__))
    if type(tensor) is torch.Tensor and tensor.numel() <= MAX_ELEMENTS:  # a real one, mixed in
        return Value(tensor, Memory(held=True))
    return None


def find_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor beside a fake one; None if its value is not known."""
    value = find_known(tensor)
    return value.real if value else None


def mark_held(fake: torch.Tensor) -> None:
    """Notes that the value of a fake tensor is what another held before the step."""
    fake.__dict__[_HELD] = True


def comes_of_held(arguments: Any, answer: Any) -> bool:
    """Tells whether what code was told of tensors' values may be otherwise in another step.

    Args:
        arguments: What it asked with.
        answer: What it was told; where the values are not known, whether all is well, or what a
            size hint says.
    """
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor):
            value = find_known(tensor)
            if value.memory.held if value else not isinstance(answer, bool):
                return True
    return False

"""Values of tensors that an analysis knows: a fake tensor may carry a real one beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fxmem.patching import patch

MAX_ELEMENTS = 1 << 16
"""Larger tensors get no value: computing them would take time and memory."""
_MOST_WHOLE = 1 << 20
"""The same of integers and truth values, such as the mask of many long texts."""

DRAW, ROUTING, STAND_IN, SELECTED = "draw", "routing", "stand-in", "selected"
"""Values that are assumed: a random number, the experts that tokens are sent to, a number, and
some of known numbers."""
_MOST_ROUTED = 1 << 25
"""Larger masks of experts get no value."""
_VALUE = "_fxmem_value"
_HELD = "_fxmem_held"
_COUNT = "_fxmem_count"


@dataclass(slots=True)
class Memory:
    """Memory that values share."""

    known: bool = True  # nothing unknown has overwritten it
    held: bool = False  # by an input or the model before the step: other steps may have others
    copied: bool = False  # a view of partly known values has some of its own: none may be changed


@dataclass(frozen=True, slots=True)
class Value:
    """A real tensor, and the memory that it shares with the values of its views."""

    real: torch.Tensor  # the least that each element may be
    memory: Memory
    assumed: str = ""  # what it came of, if that was assumed: DRAW, ROUTING, STAND_IN or SELECTED
    most: torch.Tensor | None = None  # that each element may be; None if all of them are known


def attach_value(
    fake: torch.Tensor,
    real: torch.Tensor,
    memory: Memory | None = None,
    *,
    assumed: str = "",
    most: torch.Tensor | None = None,
) -> None:
    """Lets a fake tensor carry a real one, which nothing else may change.

    A view gets the memory of the value that it is a view of. With ``most``, the two are bounds.
    """
    fake.__dict__[_VALUE] = Value(real, memory or Memory(), assumed, most)


def is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is of integers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def find_most_elements(*tensors: torch.Tensor, values: Iterable[Value] = ()) -> int:
    """Finds how large tensors may be together to get values, such as results of known values."""
    if any(value.assumed == ROUTING for value in values):
        return _MOST_ROUTED
    return _MOST_WHOLE if all(map(is_whole, tensors)) else MAX_ELEMENTS


def remember_constant(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the value of a small real tensor that the user's code holds."""
    if real.device.type == "cpu" and real.numel() <= find_most_elements(real):
        with _disable_current_modes():
            attach_value(fake, real.detach().clone(), Memory(held=True))


def find_attached(tensor: torch.Tensor) -> Value | None:
    """Returns what was attached to a tensor, whether still known or not."""
    value: Value | None = tensor.__dict__.get(_VALUE)
    return value


def find_known(tensor: torch.Tensor) -> Value | None:
    """Finds the value of a tensor and its memory; None if it is not known."""
    value = find_partly_known(tensor)
    return None if value is None or value.most is not None else value


def find_partly_known(tensor: torch.Tensor) -> Value | None:
    """Finds the value of a tensor of which some elements are known, or all."""
    value = find_attached(tensor)
    if value is not None:
        return value if value.memory.known else None
    if isinstance(tensor, FakeTensor):
        # What torch.tensor(...) made; the fake mode itself forgets it when it is overwritten.
        if tensor.constant is None:
            return None
        return Value(tensor.constant, Memory(held=_HELD in tensor.__dict__))
    is_real = type(tensor) is torch.Tensor  # mixed in
    if is_real and tensor.numel() <= find_most_elements(tensor):
        return Value(tensor, Memory(held=True))
    return None


def find_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Finds the real tensor beside a fake one; None if its value is not known."""
    value = find_known(tensor)
    return value.real if value else None


def keep_value(fake: torch.Tensor, view: torch.Tensor) -> None:
    """Gives a view of all of a fake tensor the value of that, and the count of its elements."""
    for name in (_VALUE, _COUNT):
        if name in fake.__dict__:
            view.__dict__[name] = fake.__dict__[name]


def forget_value(fake: FakeTensor) -> None:
    """Forgets the value of a tensor that something unknown may write."""
    fake.constant = None
    if (value := find_attached(fake)) is not None:
        value.memory.known = False


def remember_count(fake: torch.Tensor, count: int) -> None:
    """Keeps how many elements a search finds: backward searches a mask again."""
    fake.__dict__[_COUNT] = count


def find_count(fake: torch.Tensor) -> int | None:
    """Finds how many elements a search of a tensor found before."""
    count: int | None = fake.__dict__.get(_COUNT)
    return count


def mark_held(fake: torch.Tensor) -> None:
    """Notes that the value of a fake tensor is that of a tensor from before the step."""
    fake.__dict__[_HELD] = True


def comes_of_held(arguments: Any, answer: Any) -> bool:
    """Returns whether an answer that tensors' values decided may differ in another step.

    Where the values are not known, a bool says that all is well, and a number is the size hint.
    """
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor):
            value = find_known(tensor)
            if value.memory.held if value else not isinstance(answer, bool):
                return True
    return False


def answer_fake_checks(module: ModuleType) -> contextlib.AbstractContextManager[None]:
    """Lets tensors of known value pass for real ones where transformers asks.

    ``masking_utils._ignore_causal_mask_sdpa`` looks whether a mask masks anything, but not into
    fake tensors, for which it makes masks that no run has.

    Args:
        module: ``transformers.utils.import_utils``.
    """
    if not hasattr(module, "is_fake_tensor"):
        return contextlib.nullcontext()

    def is_fake_tensor(value: object) -> bool:
        return isinstance(value, FakeTensor) and find_known(value) is None

    return patch({module: {"is_fake_tensor": is_fake_tensor}})

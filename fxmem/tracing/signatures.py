"""What of an argument a graph depends on that is traced with it: sizes, dtypes, structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fxmem.tracing.changes import freeze_plain, take_snapshot
from fxmem.tracing.contexts import Autocast

SIGNATURE = "fxmem_signature"
"""Key of a placeholder's ``meta``: the description of what it was traced with."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)

Kind = tuple[torch.dtype, bool, torch.Size | None] | None
"""Of a parameter or buffer: its dtype and size, which code may ask for, and whether it wants a
gradient, which code may give a buffer itself; None where there is none, or one without a size yet.
"""

Tie = tuple[int, int]
"""The position of a tensor among others, and that of the same one before it."""


class Surroundings(NamedTuple):
    """What a graph was traced in and with, beside its arguments one by one.

    Attributes:
        autocast: What calls were autocast to.
        default: The default dtype.
        kinds: Those of the parameters and buffers.
        ties: Parameters and buffers that are others too: the graph has one name for both.
        same: Tensors among the arguments that are others too.
    """

    autocast: Autocast
    default: torch.dtype
    kinds: tuple[Kind, ...]
    ties: tuple[Tie, ...] = ()
    same: tuple[Tie, ...] = ()


def list_kinds(
    parameters: Iterable[Mapping[str, Tensor | None]],
    buffers: Iterable[Mapping[str, Tensor | None]] = (),
) -> tuple[Kind, ...]:
    """What of the parameters and buffers of modules decides what code does with them.

    Args:
        parameters: Of each module, those that it holds.
        buffers: Likewise.

    >>> list_kinds([torch.nn.Linear(2, 1)._parameters])
    ((torch.float32, True, torch.Size([1, 2])), (torch.float32, True, torch.Size([1])))
    """
    wanting = [
        None if tensor is None else (tensor.dtype, tensor.requires_grad, _find_size(tensor))
        for table in parameters
        for tensor in table.values()
    ]
    others = [
        None if tensor is None else (tensor.dtype, False, _find_size(tensor))
        for table in buffers
        for tensor in table.values()
    ]
    return tuple(wanting + others)


def _find_size(tensor: Tensor) -> torch.Size | None:
    return None if is_lazy(tensor) else tensor.shape


def list_ties(tensors: Sequence[Tensor | None]) -> tuple[Tie, ...]:
    """Which of some tensors are the same one as another before.

    >>> one, other = torch.ones(1), torch.ones(1)
    >>> list_ties([one, other, None, one])
    ((3, 0),)
    """
    if torch.compiler.is_compiling():  # which has no ids of tensors
        firsts = [
            next((before for before in range(at) if tensors[before] is tensor), at)
            for at, tensor in enumerate(tensors)
        ]
    else:
        known: dict[int, int] = {}
        firsts = [known.setdefault(id(tensor), at) for at, tensor in enumerate(tensors)]
    return tuple(
        [(at, first) for at, first in enumerate(firsts) if at != first and tensors[at] is not None]
    )


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument, through lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for element in value for tensor in list_tensors(element)]
    if isinstance(value, Mapping):
        return [tensor for element in value.values() for tensor in list_tensors(element)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [tensor for name in names for tensor in list_tensors(getattr(value, name, None))]
    return []


def describe_value(value: Any) -> Hashable:
    """An argument without the numbers in its tensors: equal for equal sizes, dtypes and structure.

    Code may ask whether a tensor wants a gradient or how it lies, too; and of anything else what
    it is and holds.

    >>> import torch
    >>> describe_value([torch.zeros(2, 3), 2])
    (<class 'list'>, ((2, 3), torch.float32, False, True), (<class 'int'>, 2))
    """
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided
        strides = not is_dense or value.is_contiguous() or value.stride()
        return tuple(value.shape), value.dtype, value.requires_grad, strides
    if isinstance(value, _PLAIN):
        return freeze_plain(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *[describe_value(element) for element in value])
    if isinstance(value, Mapping):
        keys = [describe_value(key) for key in value]
        return (type(value), *keys, *[describe_value(element) for element in value.values()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return (type(value), *[describe_value(getattr(value, name, None)) for name in names])
    if isinstance(value, slice):
        return (slice, *[describe_value(end) for end in (value.start, value.stop, value.step)])
    if torch.compiler.is_compiling():  # which cannot follow the rest: it is like nothing
        return (type(value),)
    return take_snapshot([value], describe_value)

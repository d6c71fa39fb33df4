"""What of an argument a graph depends on that is traced with it: sizes, dtypes, structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fxmem.tracing.changes import freeze_plain, take_snapshot

SIGNATURE = "fxmem_signature"
"""Key of a placeholder's ``meta``: the description of what it was traced with."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)

Kind = tuple[torch.dtype, bool]
"""Of a parameter: its dtype, which code may ask for, and whether it wants a gradient."""


def list_kinds(tables: Iterable[Mapping[str, Tensor | None]]) -> tuple[Kind, ...]:
    """What of the parameters of modules decides what code does with them.

    Args:
        tables: Of each module, those that it holds.

    >>> list_kinds([torch.nn.Linear(2, 1)._parameters])
    ((torch.float32, True), (torch.float32, True))
    """
    return tuple(
        [
            (parameter.dtype, parameter.requires_grad)
            for table in tables
            for parameter in table.values()
            if parameter is not None
        ]
    )


def describe_value(value: Any) -> Hashable:
    """An argument without the numbers in its tensors: equal for equal sizes, dtypes and structure.

    Code may ask whether a tensor wants a gradient or is contiguous, too; and of anything else what
    it is and holds.

    >>> import torch
    >>> describe_value([torch.zeros(2, 3), 2])
    (<class 'list'>, ((2, 3), torch.float32, False, True), (<class 'int'>, 2))
    """
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided
        is_contiguous = not is_dense or value.is_contiguous()
        return tuple(value.shape), value.dtype, value.requires_grad, is_contiguous
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

"""What of an argument a graph depends on that is traced with it: sizes, dtypes, structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

SIGNATURE = "fxmem_signature"
"""Key of a placeholder's ``meta``: the description of what it was traced with."""
_PLAIN = (type(None), bool, int, float, complex, str)


def describe_value(value: Any) -> Hashable:
    """An argument without the numbers in its tensors: equal for equal sizes, dtypes and structure.

    >>> import torch
    >>> describe_value({"ids": torch.zeros(2, 3), "scale": 2})
    ((<class 'dict'>, 'ids', 'scale'), ((2, 3), torch.float32), 2)
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value), *[describe_value(element) for element in value])
    if isinstance(value, Mapping):
        held = [describe_value(element) for element in value.values()]
        return ((type(value), *value), *held)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return (type(value), *[describe_value(getattr(value, name, None)) for name in names])
    return (type(value),)

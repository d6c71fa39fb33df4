"""Whether a call changes Python objects, such as a cache that it is given or its module's own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_WHOLE = (Tensor, nn.Module, type, ModuleType)
"""What is the same as long as it is the same object: a tensor's numbers are none of it."""
_MOST = 10_000
"""Entries that are looked at."""

Snapshot = tuple[object, ...]


def take_snapshot(values: Iterable[object]) -> Snapshot:
    """What some Python objects hold: their elements and attributes, down to tensors and modules.

    Functions hold what they close over, methods their objects too.

    Nothing that is held is kept alive by it, for which weak references stand.

    Args:
        values: The objects.

    >>> cache = [torch.ones(1)]
    >>> before = take_snapshot([cache])
    >>> is_same(before, take_snapshot([cache]))
    True
    >>> cache.append(torch.ones(1))
    >>> is_same(before, take_snapshot([cache]))
    False
    """
    found: list[object] = []
    seen: set[int] = set()
    waiting = deque(values)
    while waiting and len(found) < _MOST:
        value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found.append(value)
            continue
        held = _list_held(value)
        found.append(_refer(value) if held is None else (type(value), len(held)))
        if held and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(held)
    return tuple(found)


def is_same(before: Snapshot, after: Snapshot) -> bool:
    """Whether two snapshots of the same objects show no change.

    Args:
        before: The earlier one.
        after: The later one.
    """
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and isinstance(a, (*_PLAIN, tuple)) and a == b)
        for a, b in zip(before, after, strict=True)
    )


def _list_held(value: Any) -> list[object] | None:
    """What can change in an object; None where it is looked at as a whole."""
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return _list_closure(value)
    held: list[object] = []
    is_open = False
    if isinstance(value, dict):
        held += [*dict.keys(value), *dict.values(value)]
        is_open = True
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held += value
        is_open = True
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        held += attributes.values()
        is_open = True
    return held if is_open else None


def _list_closure(function: FunctionType) -> list[object] | None:
    """What a function closes over; of our own, which watch the code, nothing."""
    if not function.__closure__ or function.__module__.split(".")[0] == "fxmem":
        return None
    return [*map(_read_cell, function.__closure__)]


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _refer(value: object) -> object:
    try:
        return weakref.ref(value)  # the same one again as long as the object lives
    except TypeError:
        return id(value)

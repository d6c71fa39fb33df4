"""Whether a call changes Python objects, such as a cache that it is given or its module's own."""

from __future__ import annotations

import copy
import functools
import marshal
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from itertools import chain
from numbers import Number
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.tracing.reach import NUMBERS_AND_TEXT, list_attributes, list_slots, open_cell

_PLAIN = (
    *NUMBERS_AND_TEXT,
    torch.dtype,
    torch.device,
    Enum,
    Number,  # NumPy's too, decimals and fractions
)
_WHOLE = (Tensor, nn.Module, type, ModuleType)
"""What is the same as long as it is the same object: a tensor's numbers are none of it."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST = 10_000
"""Entries that are looked at one by one."""
_LONG = 16
"""Entries of which a hash tells, where they are numbers and text, or lists of these."""
_TEXT = frozenset({str, bytes, type(None)})
_FOLDED = frozenset({*NUMBERS_AND_TEXT})
_FLAT = 2
"""The version of ``marshal`` that writes equal values alike, whether or not they are one object."""
_MOST_BYTES = 2**24
"""Of an array whose numbers are looked at."""

Snapshot = tuple[object, ...]
"""Equal to another that shows the same, and hashable."""


class _Reference:
    """Stands for an object: equal to what stands for the same one, and to nothing once it is gone.

    Where no weak reference can be had (of a range, an iterator) it keeps the object: else another
    would come to lie where that one did. A copy stands for the copy of the object; one from a file
    for nothing.
    """

    __slots__ = ("_get", "_hash")

    def __init__(self, value: object) -> None:
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = functools.partial(_return_it, value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self._get()
        return value is not None and isinstance(other, _Reference) and other._get() is value

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return _Reference(copy.deepcopy(self._get(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reference, (object(),)


def _return_it(value: object) -> object:
    return value


def take_snapshot(
    values: Iterable[object], describe_tensor: Callable[[Tensor], Hashable] | None = None
) -> Snapshot:
    """What some Python objects hold: their elements and attributes, down to tensors and modules.

    Functions hold what they close over, methods their objects too.

    What has weak references is not kept alive by it.

    Args:
        values: The objects.
        describe_tensor: What stands for a tensor, so that another may have its place; None for
            the tensor itself.

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
            found.append(freeze_plain(value))
            continue
        if describe_tensor is not None and isinstance(value, Tensor):
            found.append(describe_tensor(value))
            continue
        held = _list_held(value)
        found.append(_Reference(value) if held is None else (type(value), len(held)))
        if held and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(held)
    if waiting:  # at least how much there is of it
        found.append(len(waiting))
    return tuple(found)


def freeze_plain(value: Any) -> Hashable:
    """A plain value as what equals no value of another type, and no zero of another sign.

    >>> freeze_plain(1) == freeze_plain(True), freeze_plain(0.0) == freeze_plain(-0.0)
    (False, False)
    """
    return type(value), value or repr(value)


def is_same(before: Snapshot, after: Snapshot) -> bool:
    """Tells whether two snapshots of the same objects show no change.

    Args:
        before: The earlier one.
        after: The later one.
    """
    return before == after


def _list_held(value: Any) -> list[object] | None:
    """What can change in an object; None where it is looked at as a whole."""
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return _list_closure(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    held: list[object] = []
    if isinstance(value, dict):  # an ordered one may have another order than it shows as a dict
        keys = OrderedDict.keys(value) if isinstance(value, OrderedDict) else dict.keys(value)
        held += [*_fold([*keys]), *_fold([*dict.values(value)])]
    elif isinstance(value, _CONTAINERS):
        held += _fold([*value])
    elif isinstance(value, functools.partial):
        held += [value.func, value.args, value.keywords]
    elif not isinstance(getattr(value, "__dict__", None), dict) and not list_slots(value):
        return _read_buffer(value)
    return held + list_attributes(value)


def _fold(entries: list[object]) -> list[object]:
    """A hash for many numbers or much text, such as a vocabulary or a table; else the entries."""
    if len(entries) <= _LONG:
        return entries
    kinds = {*map(type, entries)}
    if kinds <= _TEXT:
        return [len(entries), hash((*map(type, entries), *entries))]
    rows: list[Any] = [entry for entry in entries if type(entry) in (list, tuple)]
    if kinds - {list, tuple} <= _FOLDED and {*map(type, chain.from_iterable(rows))} <= _FOLDED:
        # The hash of a number is that of others too: -1 and -2, 0.0 and -0.0.
        return [len(entries), hash(marshal.dumps(entries, _FLAT))]
    return entries


def _read_buffer(value: Any) -> list[object] | None:
    """A hash of the numbers of an array, NumPy's or Python's; None of what is none, or large."""
    try:
        with memoryview(value) as view:
            is_large = view.nbytes > _MOST_BYTES
            return None if is_large else [view.format, *(view.shape or ()), hash(view.tobytes())]
    except (TypeError, ValueError, BufferError):  # NumPy has none of some of its types
        return None


def _list_closure(function: FunctionType) -> list[object] | None:
    """What a function runs and closes over; of our own, which watch the code, nothing."""
    if not function.__closure__ or function.__module__.split(".")[0] == "fxmem":
        return None
    return [function.__code__, function.__defaults__, *map(open_cell, function.__closure__)]

"""Numbers that stand for values of fake tensors, and tell when code compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")
_ARITHMETIC = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__neg__", "__abs__"),
)
Watcher = Callable[[FrameType, object], object]
"""Is told of a comparison, by the frame that compares and the result; returns the one to take."""


class StandInFloat(float):
    """A float that stands for a value; so do sums, products and the like of such."""

    watcher: Watcher


class StandInInt(int):
    """An integer that stands for a value."""

    watcher: Watcher


def stand_in(value: Any, watcher: Watcher) -> Any:
    """Makes a number tell a watcher of comparisons; other values stay as they are.

    >>> number = stand_in(1, lambda frame, result: print("compared:", result) or result) / 2 + 1
    >>> number, type(number).__name__
    (1.5, 'StandInFloat')
    >>> number > 1
    compared: True
    True
    """
    kind: Any = {float: StandInFloat, int: StandInInt}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made.watcher = watcher
    return made


def _compare(kind: Any, name: str) -> Callable[..., Any]:
    run = getattr(kind, name)

    def compare(number: Any, *others: Any) -> Any:
        return number.watcher(sys._getframe(1), run(number, *others))

    return compare


def _compute(kind: Any, name: str) -> Callable[..., Any]:
    run = getattr(kind, name)
    return lambda number, *others: stand_in(run(number, *others), number.watcher)


def _reduce(number: Any) -> tuple[Any, ...]:
    plain = float(number) if isinstance(number, float) else int(number)
    return type(plain), (plain,)


for _class, _kind in ((StandInFloat, float), (StandInInt, int)):
    for _name in _COMPARISONS:
        setattr(_class, _name, _compare(_kind, _name))
    for _name in _ARITHMETIC:
        setattr(_class, _name, _compute(_kind, _name))
    setattr(_class, "__hash__", _kind.__hash__)  # noqa: B010 - gone with __eq__
    setattr(_class, "__reduce__", _reduce)  # noqa: B010 - a copy elsewhere is a plain number

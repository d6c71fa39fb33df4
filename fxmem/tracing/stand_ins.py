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
_watchers: list[Callable[[FrameType, object], None]] = []
"""What is told of comparisons: of the script that runs, if one does."""


class StandInFloat(float):
    """A float that stands for a value; so do sums, products and the like of such."""


class StandInInt(int):
    """An integer that stands for a value."""


def stand_in(value: Any) -> Any:
    """Makes a number tell of comparisons; other values stay as they are.

    >>> stand_in(1) / 2 + 1, type(stand_in(1) / 2).__name__
    (1.5, 'StandInFloat')
    """
    if type(value) is float:
        return StandInFloat(value)
    return StandInInt(value) if type(value) is int else value


def watch_comparisons(watcher: Callable[[FrameType, object], None] | None) -> None:
    """Has a function told of each comparison, with its frame and its result; None for none."""
    _watchers[:] = [] if watcher is None else [watcher]


def _compare(kind: Any, name: str) -> Callable[..., Any]:
    run = getattr(kind, name)

    def compare(*numbers: Any) -> Any:
        result = run(*numbers)
        for watcher in _watchers:
            watcher(sys._getframe(1), result)
        return result

    return compare


def _compute(kind: Any, name: str) -> Callable[..., Any]:
    run = getattr(kind, name)
    return lambda *numbers: stand_in(run(*numbers))


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

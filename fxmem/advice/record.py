"""One piece of advice, as pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_LEAST_BYTES = 1 << 20
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Advice:
    """A change to a step, in a line, with its effect on the peak alone.

    Attributes:
        option: The option or code that makes it.
        cost: Its cost, and what the number rests on.
    """

    change: str
    option: str
    peak_bytes: int
    saving_bytes: int
    cost: str


def choose_advice(found: Iterable[Advice], peak_bytes: int) -> tuple[Advice, ...]:
    """Chooses the advice that saves 1 MiB or 0.5 % of the peak, whichever is less; most first.

    >>> advice = [Advice("a", "b", 996, 4, ""), Advice("c", "d", 995, 5, "")]
    >>> [a.change for a in choose_advice(advice, 1000)]
    ['c']
    """
    least = min(_LEAST_BYTES, _LEAST_SHARE * peak_bytes)
    worth = [advice for advice in found if advice.saving_bytes >= max(least, 1)]
    return tuple(sorted(worth, key=lambda advice: -advice.saving_bytes))

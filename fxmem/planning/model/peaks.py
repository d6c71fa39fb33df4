"""The fall of a step's peak when something is not there for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


class PeakMeter:
    """Measures changes of the most bytes that are live during each operation of a step.

    >>> PeakMeter([1, 9, 7, 8]).measure_fall([(3, 1, 2)])
    1
    """

    def __init__(self, live_bytes: Sequence[int]) -> None:
        self._live_bytes = live_bytes
        self._before = [0, *accumulate(live_bytes, max)]
        self._after = [*reversed([*accumulate(reversed(live_bytes), max)]), 0]

    def measure_fall(self, gone: Iterable[tuple[int, int, int]]) -> int:
        """Measures how much lower the peak is without bytes, from one operation to another."""
        gone = [*gone]
        start = min(first for _, first, _ in gone)
        stop = max(last for _, _, last in gone) + 1
        live_bytes = [*self._live_bytes[start:stop]]
        for nbytes, first, last in gone:
            for index in range(first - start, last - start + 1):
                live_bytes[index] -= nbytes
        return self._before[-1] - max(*live_bytes, self._before[start], self._after[stop])

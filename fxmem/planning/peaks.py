"""By how much a step's peak falls when something is not there for a while."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fxmem.graph import MemoryGraph
from fxmem.timeline import build_timeline


class PeakMeter:
    """The live bytes of a step, to ask again and again.

    Args:
        live_bytes: For each operation, the most bytes that are live while it runs.

    >>> PeakMeter([1, 9, 7, 8]).measure_fall(3, 1, 2)
    1
    """

    def __init__(self, live_bytes: Sequence[int]) -> None:
        self._live_bytes = live_bytes
        self._before = [0, *accumulate(live_bytes, max)]
        self._after = [*reversed([*accumulate(reversed(live_bytes), max)]), 0]

    def measure_fall(self, nbytes: int, first: int, last: int) -> int:
        """How much lower the peak is without so many bytes from one operation to another.

        Args:
            nbytes: What is not there.
            first: Index of the first operation at which it is not.
            last: Index of the last.
        """
        most = max(self._live_bytes[first : last + 1], default=nbytes) - nbytes
        return self._before[-1] - max(most, self._before[first], self._after[last + 1])


def meter_graph(graph: MemoryGraph) -> PeakMeter:
    """The live bytes of a step as it was recorded."""
    return PeakMeter(build_timeline(graph).profile())

"""Segments: consecutive nodes that forward runs without saving and backward recomputes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

_Segment = TypeVar("_Segment")
Span: TypeAlias = tuple[int, int]
"""Indices of a first node and of the node after the last."""


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Consecutive nodes under one checkpoint.

    Attributes:
        start: Index of its first node.
        stop: Index after that of its last.
        children: Segments within it, apart and in order: what they hold is computed once more
            when backward needs it.

    >>> 3 in SegmentRange(0, 4, (SegmentRange(1, 3),)), 4 in SegmentRange(0, 4)
    (True, False)
    """

    start: int
    stop: int
    children: tuple[SegmentRange, ...] = ()

    def __contains__(self, node: int | None) -> bool:
        """Returns whether a node lies in the segment, by its index."""
        return node is not None and self.start <= node < self.stop


Segments: TypeAlias = tuple[SegmentRange, ...]
"""All segments of a plan, or within one segment: apart from each other and in order."""


def iterate_segments(segments: Iterable[_Segment]) -> Iterator[_Segment]:
    """Iterates over all segments, of a search or of a plan, each before those within it."""
    for segment in segments:
        yield segment
        yield from iterate_segments(segment.children)  # type: ignore[attr-defined]


def nest_spans(spans: Iterable[Span]) -> Segments:
    """Makes segments of spans that lie apart or within each other.

    >>> nest_spans([(1, 3), (0, 4), (6, 8)])
    (SegmentRange(start=0, stop=4, children=(SegmentRange(start=1, stop=3, children=()),)), \
SegmentRange(start=6, stop=8, children=()))
    """
    ordered = sorted(set(spans), key=lambda span: (span[0], -span[1]))

    def nest(at: int, stop: int) -> tuple[Segments, int]:
        segments: list[SegmentRange] = []
        while at < len(ordered) and ordered[at][0] < stop:
            start, end = ordered[at]
            children, at = nest(at + 1, end)
            segments.append(SegmentRange(start, end, children))
        return tuple(segments), at

    return nest(0, sys.maxsize)[0]

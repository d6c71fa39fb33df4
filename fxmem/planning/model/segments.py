"""Segments: runs of nodes that forward computes without saving and backward computes again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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
        """Whether a node lies in the segment, by its index."""
        return node is not None and self.start <= node < self.stop


def iterate_segments(segments: Iterable[SegmentRange]) -> Iterator[SegmentRange]:
    """All segments, each before those within it."""
    for segment in segments:
        yield segment
        yield from iterate_segments(segment.children)


def shift_segments(segments: Iterable[SegmentRange], by: int) -> tuple[SegmentRange, ...]:
    """The same segments some nodes further on.

    >>> shift_segments([SegmentRange(0, 4, (SegmentRange(1, 3),))], 10)
    (SegmentRange(start=10, stop=14, children=(SegmentRange(start=11, stop=13, children=()),)),)
    """
    return tuple(
        SegmentRange(segment.start + by, segment.stop + by, shift_segments(segment.children, by))
        for segment in segments
    )

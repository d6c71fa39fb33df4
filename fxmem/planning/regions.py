"""Regions: runs of nodes that forward computes without saving and backward computes again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive nodes under one checkpoint.

    Attributes:
        start: Index of its first node.
        stop: Index after that of its last.
        children: Regions within it, apart and in order: what they hold is computed once more
            when backward needs it.

    >>> 3 in Region(0, 4, (Region(1, 3),)), 4 in Region(0, 4)
    (True, False)
    """

    start: int
    stop: int
    children: tuple[Region, ...] = ()

    def __contains__(self, node: int | None) -> bool:
        """Whether a node lies in the region, by its index."""
        return node is not None and self.start <= node < self.stop


def iterate_regions(regions: Iterable[Region]) -> Iterator[Region]:
    """All regions, each before those within it."""
    for region in regions:
        yield region
        yield from iterate_regions(region.children)


def shift_regions(regions: Iterable[Region], by: int) -> tuple[Region, ...]:
    """The same regions some nodes further on.

    >>> shift_regions([Region(0, 4, (Region(1, 3),))], 10)
    (Region(start=10, stop=14, children=(Region(start=11, stop=13, children=()),)),)
    """
    return tuple(
        Region(region.start + by, region.stop + by, shift_regions(region.children, by))
        for region in regions
    )

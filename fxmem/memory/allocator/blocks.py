"""Blocks of memory, and the pools in which free ones wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, allocated or free.

    Attributes:
        address: Where it begins.
        size: Its bytes, the slack behind the request included.
        stream: The stream for which it was allocated; others never get it.
        pool: Where it waits when it is free.
        requested_bytes: What was asked for.
        allocated: Whether it is in use.
        mapped: Whether memory lies behind its addresses; only blocks of an expandable segment
            can be without.
        previous: The block before it in its segment.
        next: The block behind it.
        segment: The expandable segment it lies in; None for a segment of ``cudaMalloc``.
    """

    address: int
    size: int
    stream: int
    pool: BlockPool
    requested_bytes: int = 0
    allocated: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None
    segment: ExpandableSegment | None = None

    @property
    def is_split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.previous is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes.

        Returns:
            The rest, linked behind it and in no pool.
        """
        rest = Block(
            self.address + size,
            self.size - size,
            self.stream,
            self.pool,
            mapped=self.mapped,
            previous=self,
            next=self.next,
            segment=self.segment,
        )
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """A range of addresses behind which pages of memory are mapped as they are needed.

    Attributes:
        address: Where the range begins.
        size: Bytes of the range.
        page_bytes: What is mapped and unmapped at once.
    """

    address: int
    size: int
    page_bytes: int

    def round_down(self, address: int) -> int:
        """The page boundary at or before an address."""
        return address - (address - self.address) % self.page_bytes

    def round_up(self, address: int) -> int:
        """The page boundary at or behind an address."""
        return address + (self.address - address) % self.page_bytes


class BlockPool:
    """The free blocks of one kind, for all streams.

    Attributes:
        is_small: Whether it is for blocks of at most 1 MiB.
        free: Mapped free blocks, by stream, then size, then address
            (``BlockComparatorSize``).
        unmapped: Blocks of addresses without memory, by stream, then address
            (``BlockComparatorAddress``).
    """

    __slots__ = ("free", "is_small", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        """Put a free block where its size belongs."""
        insort(self.free, (block.stream, block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]

    def find(self, stream: int, size: int) -> int:
        """Position of the smallest block of at least ``size`` bytes, ties by address.

        It may lie behind the blocks of the stream: the end, or a block of another stream.
        """
        return bisect_left(self.free, (stream, size))

    def largest_bytes(self) -> int:
        """The size of the largest free block of any stream; 0 without one."""
        largest, end = 0, len(self.free)
        while end > 0:
            stream, size = self.free[end - 1][:2]
            largest = max(largest, size)
            end = bisect_left(self.free, (stream,))
        return largest

    def add_unmapped(self, block: Block) -> None:
        """Put a block without memory where its address belongs."""
        insort(self.unmapped, (block.stream, block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Take a block without memory out."""
        del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

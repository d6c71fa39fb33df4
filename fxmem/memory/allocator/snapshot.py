"""What a caching allocator holds at one moment, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from fxmem.memory.allocator.heap import Heap


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a segment.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        requested_bytes: What was asked for; 0 where it is free.
        allocated: Whether it is in use.
    """

    address: int
    size: int
    requested_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Memory that lies in one piece: a segment of ``cudaMalloc``, or pages next to each other.

    Attributes:
        address: Where it begins.
        size: Its bytes, which are those of its blocks.
        stream: For which stream.
        is_small: Whether it belongs to the small pool.
        is_expandable: Whether it is part of an expandable segment.
        blocks: In the order of their addresses, without gaps.
    """

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockState, ...]


def take_snapshot(heap: Heap) -> tuple[SegmentState, ...]:
    """All that is reserved, in the order of the addresses.

    Source of the pieces: ``DeviceCachingAllocator::snapshot``.
    """
    segments = []
    for blocks in heap.walk():
        for mapped, group in groupby(blocks, key=lambda block: block.mapped):
            if not mapped:
                continue
            piece = tuple(group)
            segments.append(
                SegmentState(
                    address=piece[0].address,
                    size=sum(block.size for block in piece),
                    stream=piece[0].stream,
                    is_small=piece[0].pool.is_small,
                    is_expandable=piece[0].segment is not None,
                    blocks=tuple(
                        BlockState(
                            block.address,
                            block.size,
                            block.requested_bytes if block.allocated else 0,
                            block.allocated,
                        )
                        for block in piece
                    ),
                )
            )
    return tuple(segments)

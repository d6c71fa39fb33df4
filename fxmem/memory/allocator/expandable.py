"""Expandable segments: one range of addresses that grows and shrinks by pages.

Source: ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block``,
``unmap_block`` and ``release_expandable_segment`` in PyTorch's ``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left

from fxmem.memory.allocator.blocks import Block, BlockPool, ExpandableSegment
from fxmem.memory.allocator.heap import Heap, TraceAction


def expandable_size(block: Block) -> int:
    """Bytes of a free block and of the addresses behind it that have no memory yet."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def grow_expandable(
    heap: Heap, pool: BlockPool, stream: int, size: int, page_bytes: int
) -> Block | None:
    """A free block of at least ``size`` bytes, with pages mapped where they were missing.

    Returns:
        The block, in no pool; None where the device has no memory left. Pages that were mapped
        before it ran out stay.
    """
    block = _find_room(heap, pool, stream, size, page_bytes)
    if not block.mapped and not _map(heap, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        # Only a request larger than the range itself finds nothing behind it.
        if behind is None or not _map(heap, behind, min(size - block.size, behind.size)):
            return None
        block = behind
    pool.remove(block)
    return block


def unmap_pages(heap: Heap, block: Block) -> None:
    """Give the whole pages of a free block back to the device.

    A range in which nothing is left goes altogether.
    """
    segment, pool, end = _segment_of(block), block.pool, block.address + block.size
    first, last = segment.round_up(block.address), segment.round_down(end)
    if first >= last:
        return
    pool.remove(block)
    if first > block.address:
        front, block = block, block.split(first - block.address)
        pool.add(front)
    if last < end:
        pool.add(block.split(last - first))
    block.mapped = False
    heap.merge(block, block.previous)
    heap.merge(block, block.next)
    heap.shrink(last - first)
    heap.record(TraceAction.SEGMENT_UNMAP, first, last - first, block.stream)
    if block.is_split:
        pool.add_unmapped(block)
    else:
        heap.heads.remove(block)


def _find_room(heap: Heap, pool: BlockPool, stream: int, size: int, page_bytes: int) -> Block:
    """The lowest address with room for ``size`` bytes, free or without memory."""
    unmapped = pool.unmapped
    at = bisect_left(unmapped, (stream,))
    while at < len(unmapped) and unmapped[at][0] == stream:
        block = unmapped[at][2]
        if block.previous is not None and not block.previous.allocated:
            block = block.previous
        if _has_room(block, size):
            return block
        at += 1
    return heap.add_expandable(stream, pool, page_bytes)


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.next
    return room >= size


def _map(heap: Heap, block: Block, size: int) -> bool:
    """Put pages behind the first ``size`` bytes of a block, and the block into its pool."""
    segment, pool = _segment_of(block), block.pool
    mapped = segment.round_up(block.address + size) - block.address
    if not heap.memory.take(mapped):
        return False
    address = block.address
    pool.remove_unmapped(block)
    if mapped < block.size:
        pool.add_unmapped(block.split(mapped))
    block.mapped = True
    heap.merge(block, block.previous)
    heap.merge(block, block.next)
    pool.add(block)
    heap.grow(mapped)
    heap.record(TraceAction.SEGMENT_MAP, address, mapped, block.stream)
    return True


def _segment_of(block: Block) -> ExpandableSegment:
    assert block.segment is not None
    return block.segment

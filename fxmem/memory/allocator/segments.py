"""Segments that grow by pages, and cached memory that is given back when a request fails.

Source: ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block``,
``unmap_block``, ``release_available_cached_blocks`` and ``release_cached_blocks`` in PyTorch's
``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left

from fxmem.memory.allocator.heap import Block, BlockPool, Heap, TraceAction


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


def _find_room(heap: Heap, pool: BlockPool, stream: int, size: int, page_bytes: int) -> Block:
    """The lowest address with room for ``size`` bytes, free or without memory."""
    at = bisect_left(pool.unmapped, (stream,))
    for other, _, block in pool.unmapped[at:]:
        if other != stream:
            break
        if block.previous is not None and not block.previous.allocated:
            block = block.previous
        room = 0
        part: Block | None = block
        while room < size and part is not None and not part.allocated:
            room, part = room + part.size, part.next
        if room >= size:
            return block
    return heap.add_expandable(stream, pool, page_bytes)


def _map(heap: Heap, block: Block, size: int) -> bool:
    """Put pages behind the first ``size`` bytes of a block, and the block into its pool."""
    segment, pool, address = block.segment, block.pool, block.address
    assert segment is not None
    mapped = segment.round_up(address + size) - address
    if not heap.memory.take(mapped):
        return False
    pool.remove_unmapped(block)
    if mapped < block.size:
        pool.add_unmapped(block.split(mapped))
    block.mapped = True
    heap.merge(block, block.previous)
    heap.merge(block, block.next)
    pool.add(block)
    heap.reserved_bytes += mapped
    heap.record(TraceAction.SEGMENT_MAP, address, mapped, block.stream)
    return True


def release_oversize(
    heap: Heap, pool: BlockPool, stream: int, size: int, max_split_bytes: int
) -> bool:
    """Free as few of the blocks that are never split as make room for ``size`` bytes.

    Returns:
        Whether they make room.
    """
    wanted = max(size, max_split_bytes)
    at = pool.find(stream, wanted)
    if at < len(pool.free):
        block = pool.free[at][3]
        if block.stream == stream and block.segment is None:
            heap.release_segment(block)
            return True
    released = 0
    while at > 0 and released < wanted:
        at -= 1
        block = pool.free[at][3]
        if block.size < max_split_bytes or block.stream != stream:
            break
        if block.segment is None:
            released += block.size
            heap.release_segment(block)
    return released >= wanted


def release_all(heap: Heap) -> None:
    """Free every segment of which nothing is in use, and every whole page of expandable ones."""
    for pool in (heap.large, heap.small):
        blocks = [entry[3] for entry in pool.free]
        for block in blocks:
            if block.segment is None and not block.is_split:
                heap.release_segment(block)
        for block in blocks:
            if block.segment is not None:
                _unmap_pages(heap, block)


def _unmap_pages(heap: Heap, block: Block) -> None:
    """Give the whole pages of a free block back to the device; a range without any goes."""
    segment, pool, end = block.segment, block.pool, block.address + block.size
    assert segment is not None
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
    heap.give_back(last - first)
    heap.record(TraceAction.SEGMENT_UNMAP, first, last - first, block.stream)
    if block.is_split:
        pool.add_unmapped(block)
    else:
        heap.heads.remove(block)

"""Cached memory that is freed when a request fails.

Source: ``release_available_cached_blocks`` and ``release_cached_blocks`` in PyTorch's
``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from fxmem.memory.allocator.blocks import Block, BlockPool
from fxmem.memory.allocator.expandable import unmap_pages
from fxmem.memory.allocator.heap import Heap
from fxmem.memory.allocator.settings import UNLIMITED_BYTES


def release_oversize(
    heap: Heap, pool: BlockPool, stream: int, size: int, max_split_bytes: int
) -> bool:
    """Free as few of the blocks that are never split as make room for ``size`` bytes.

    Returns:
        Whether they make room.
    """
    if max_split_bytes == UNLIMITED_BYTES:
        return False
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
        to_unmap: list[Block] = []
        for block in [entry[3] for entry in pool.free]:
            if block.segment is not None:
                to_unmap.append(block)
            elif not block.is_split:
                heap.release_segment(block)
        for block in to_unmap:
            unmap_pages(heap, block)

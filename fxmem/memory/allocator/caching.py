"""The CUDA caching allocator, simulated.

The rules come from ``DeviceCachingAllocator`` in PyTorch's ``CUDACachingAllocator.cpp``, for
programs that use each block on the stream it was allocated for: what waits for the events of other
streams, and the private pools of CUDA graphs, are left out. Segments that grow by pages follow its
``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and ``unmap_block``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from fxmem.errors import FxmemError, UsageError
from fxmem.memory.allocator.heap import (
    Block,
    BlockPool,
    DeviceMemory,
    Heap,
    SegmentState,
    TraceAction,
    TraceEvent,
)
from fxmem.memory.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from fxmem.units import format_bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that fits nowhere, after everything cached was given back."""

    requested_bytes: int  # what was asked for
    segment_bytes: int  # what the device should have given for it
    allocated_bytes: int  # the blocks that are in use
    reserved_bytes: int  # the segments that hold them
    device_free_bytes: int  # what the device has left


class OutOfMemory(FxmemError):
    """A simulated allocator found no room for a request.

    Attributes:
        shortage: The figures.
    """

    def __init__(self, shortage: Shortage) -> None:
        unused_bytes = shortage.reserved_bytes - shortage.allocated_bytes
        super().__init__(
            f"out of memory: {format_bytes(shortage.segment_bytes)} more do not fit, with "
            f"{format_bytes(shortage.allocated_bytes)} allocated, {format_bytes(unused_bytes)} "
            f"reserved but unallocated and {format_bytes(shortage.device_free_bytes)} free"
        )
        self.shortage = shortage


class CachingAllocator:
    """A simulation of the native caching allocator of one device.

    Args:
        settings: As ``PYTORCH_ALLOC_CONF`` gives them. They can be changed later by setting
            :attr:`settings`, as with ``torch.cuda.memory._set_allocator_settings``.
        memory: The device; without one, memory that never ends.
        trace: Called with every event, in order.

    Attributes:
        settings: The settings.
        allocated_bytes: Sum of the blocks in use, as ``torch.cuda.memory_allocated()``.
        requested_bytes: Sum of what was asked for.
        retries: How often the whole cache was given back to make room.

    Without other streams a freed block is free at once, so ``active_bytes`` of
    ``torch.cuda.memory_stats()`` is ``allocated_bytes``.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3_000_000)
    >>> allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
    (3000000, 3000320, 20971520)
    >>> allocator.free(block)
    >>> allocator.empty_cache()
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 0)
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        memory: DeviceMemory | None = None,
        trace: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.requested_bytes = self.retries = 0
        self._heap = Heap(memory or DeviceMemory(), trace)
        if self.settings.memory_fraction < 1 and self._heap.memory.capacity_bytes is None:
            raise UsageError(
                f"a memory fraction of {self.settings.memory_fraction} needs the memory of "
                "a device",
                hint="name a GPU",
            )

    @property
    def reserved_bytes(self) -> int:
        """Sum of the segments, as ``torch.cuda.memory_reserved()``."""
        return self._heap.reserved_bytes

    def snapshot(self) -> tuple[SegmentState, ...]:
        """All that is reserved, in the order of the addresses."""
        return self._heap.snapshot()

    def allocate(self, nbytes: int, *, stream: int = 0) -> Block | None:
        """Take a block for ``nbytes`` bytes (``DeviceCachingAllocator::malloc``).

        Returns:
            The block, to be freed by :meth:`free`; None for no bytes, which take none.

        Raises:
            OutOfMemory: There is no room. The cache was given back before.
        """
        if nbytes == 0:
            return None
        size = self.settings.round_size(nbytes)
        heap = self._heap
        pool = heap.small if size <= SMALL_LIMIT_BYTES else heap.large
        block = self._find_free(pool, stream, size) or self._get_new(pool, stream, size)
        if block is None:
            shortage = Shortage(
                nbytes,
                self.settings.segment_size(size),
                self.allocated_bytes,
                heap.reserved_bytes,
                heap.memory.free_bytes or 0,
            )
            heap.record(TraceAction.OOM, shortage.device_free_bytes, size, stream)
            raise OutOfMemory(shortage)
        self._occupy(block, pool, size, nbytes)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to its pool, joined with its free neighbours (``free_block``).

        Args:
            block: What :meth:`allocate` returned.

        Raises:
            ValueError: It is free already.
        """
        if block is None:
            return
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is free already")
        heap = self._heap
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested_bytes
        heap.record(TraceAction.FREE, block.address, block.requested_bytes, block.stream)
        block.allocated = False
        heap.merge(block, block.previous)
        heap.merge(block, block.next)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back what is cached and not split, as ``torch.cuda.empty_cache()`` does."""
        _release_all(self._heap)

    def _occupy(self, block: Block, pool: BlockPool, size: int, nbytes: int) -> None:
        """Cut a block to size and count it (``alloc_found_block``)."""
        rest = block.size - size
        if pool.is_small or self.settings.expandable_segments:
            should_split = rest >= MIN_BLOCK_BYTES
        else:
            should_split = size < self.settings.max_split_bytes and rest > SMALL_LIMIT_BYTES
        if should_split:
            pool.add(block.split(size))
        block.allocated = True
        block.requested_bytes = nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        self._heap.record(TraceAction.ALLOC, block.address, nbytes, block.stream)

    def _find_free(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """Take the best free block out of the pool (``get_free_block``)."""
        free, at = pool.free, pool.find(stream, size)
        if at < len(free) and free[at][3].segment is not None:
            at = self._pass_expandable(free, at, stream)
        if at == len(free) or free[at][0] != stream:
            return None
        block, settings = free[at][3], self.settings
        if size < settings.max_split_bytes:
            if block.size >= settings.max_split_bytes:
                return None
        elif block.size >= size + settings.max_non_split_rounding_bytes:
            return None
        del free[at]
        return block

    def _pass_expandable(
        self, free: list[tuple[int, int, int, Block]], at: int, stream: int
    ) -> int:
        """From the best fit by size, where that is an expandable block, to what is taken.

        For the best fit an expandable block counts with the addresses it can grow into; where
        expandable segments were switched off, it does not count at all.
        """
        while free[at][3].segment is not None:
            behind = at + 1
            if self.settings.expandable_segments and (
                behind == len(free)
                or free[behind][0] != stream
                or free[behind][3].growable_bytes >= free[at][3].growable_bytes
            ):
                return at
            at = behind
            if at == len(free) or free[at][0] != stream:
                return at
        return at

    def _get_new(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """Take a block from the device, after freeing what is cached if need be."""
        heap, settings = self._heap, self.settings
        block = self._ask_device(pool, stream, size)
        if block is None and _release_oversize(heap, pool, stream, size, settings.max_split_bytes):
            block = self._ask_device(pool, stream, size)
        if block is None:
            _release_all(heap)
            self.retries += 1
            block = self._ask_device(pool, stream, size)
        return block

    def _ask_device(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """Ask for a segment, or more pages of an expandable one (``alloc_block``)."""
        heap, settings = self._heap, self.settings
        segment_bytes, capacity_bytes = settings.segment_size(size), heap.memory.capacity_bytes
        if capacity_bytes is not None and settings.memory_fraction < 1:  # setMemoryFraction
            allowed_bytes = int(settings.memory_fraction * capacity_bytes)
            if heap.reserved_bytes + segment_bytes > allowed_bytes:
                return None
        if not settings.expandable_segments:
            return heap.add_segment(segment_bytes, stream, pool)
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else settings.large_segment_bytes
        return _grow_expandable(heap, pool, stream, size, page_bytes)


def _grow_expandable(
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


def _release_oversize(
    heap: Heap, pool: BlockPool, stream: int, size: int, max_split_bytes: int
) -> bool:
    """Free as few of the blocks that are never split as make room for ``size`` bytes.

    Source: ``release_available_cached_blocks``.

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


def _release_all(heap: Heap) -> None:
    """Free every segment without a block in use, and every whole page of expandable ones.

    Source: ``release_cached_blocks``.
    """
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

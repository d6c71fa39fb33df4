"""Segments taken from the device, the blocks they are cut into, and what they sum to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from fxmem.memory.allocator.blocks import Block, BlockPool, ExpandableSegment
from fxmem.memory.allocator.memory import DeviceMemory


class TraceAction(str, Enum):
    """What an allocator did, in the words of ``torch.cuda.memory._snapshot``."""

    ALLOC = "alloc"
    FREE = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of an allocator's trace.

    Attributes:
        action: What happened.
        address: Where; for OOM, the bytes that the device had left.
        nbytes: The request of an allocation or free; the size of a segment or of its pages;
            for OOM, the size of the block that was not to be had.
        stream: For which stream.
    """

    action: TraceAction
    address: int
    nbytes: int
    stream: int


class Heap:
    """The state of a caching allocator.

    Attributes:
        memory: The device.
        small: Free blocks of at most 1 MiB.
        large: The other free blocks.
        heads: The first block of every segment, expandable ones included.
        reserved_bytes: Sum of the segments.
        peak_reserved_bytes: Its highest value.
        inactive_split_bytes: Free blocks whose segment is partly in use, expandable segments
            apart: what no flush of the cache gives back.
    """

    def __init__(self, memory: DeviceMemory, trace: Callable[[TraceEvent], None] | None) -> None:
        self.memory = memory
        self.small = BlockPool(is_small=True)
        self.large = BlockPool(is_small=False)
        self.heads: set[Block] = set()
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.inactive_split_bytes = 0
        self._trace = trace

    def record(self, action: TraceAction, address: int, nbytes: int, stream: int) -> None:
        """Tell whoever listens what happened."""
        if self._trace is not None:
            self._trace(TraceEvent(action, address, nbytes, stream))

    def grow(self, nbytes: int) -> None:
        """Count memory that came from the device."""
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def shrink(self, nbytes: int) -> None:
        """Give memory back to the device."""
        self.reserved_bytes -= nbytes
        self.memory.give_back(nbytes)

    def add_segment(self, nbytes: int, stream: int, pool: BlockPool) -> Block | None:
        """A new segment as one block that is in no pool; None where the device has no memory."""
        address = self.memory.allocate(nbytes)
        if address is None:
            return None
        self.grow(nbytes)
        self.record(TraceAction.SEGMENT_ALLOC, address, nbytes, stream)
        block = Block(address, nbytes, stream, pool)
        self.heads.add(block)
        return block

    def release_segment(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the device (``release_block``)."""
        block.pool.remove(block)
        self.heads.remove(block)
        self.shrink(block.size)
        self.record(TraceAction.SEGMENT_FREE, block.address, block.size, block.stream)

    def merge(self, block: Block, neighbour: Block | None) -> int:
        """Join a block that is in no pool with a free neighbour (``try_merge_blocks``).

        Returns:
            The bytes that it grew by; 0 where the neighbour is in use, or mapped otherwise.
        """
        if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
            return 0
        if block.previous is neighbour:
            block.address = neighbour.address
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.next = block
            else:
                self.heads.remove(neighbour)
                self.heads.add(block)
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        block.size += neighbour.size
        return neighbour.size

    def add_expandable(self, stream: int, pool: BlockPool, page_bytes: int) -> Block:
        """A new range of addresses, as one block without memory."""
        size = -(-self.memory.expandable_bytes // page_bytes) * page_bytes
        segment = ExpandableSegment(self.memory.reserve_addresses(size), size, page_bytes)
        block = Block(segment.address, size, stream, pool, mapped=False, segment=segment)
        self.heads.add(block)
        pool.add_unmapped(block)
        return block

    def walk(self) -> Iterator[tuple[Block, ...]]:
        """The blocks of each segment, in the order of their addresses."""
        for head in sorted(self.heads, key=lambda block: block.address):
            blocks = [head]
            while (behind := blocks[-1].next) is not None:
                blocks.append(behind)
            yield tuple(blocks)

"""Segments taken from a device, the blocks they are cut into, and the pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

_PAGE_BYTES = 2 * 1024**2
_FIRST_ADDRESS = 0x7F00_0000_0000
_ADDRESS_SPACE_BYTES = 1 << 40
"""Addresses of an expandable segment on a device of unlimited memory."""


class DeviceMemory:
    """Physical memory that can run out, and addresses that cannot.

    Addresses only ever grow, in steps of the driver's 2 MiB pages; a real driver hands freed
    ones out again, and in an order of its own. An address decides nothing but which of two cached
    blocks of one size is taken first.

    Args:
        capacity_bytes: Total memory of the device; None has no end.
        context_bytes: The share of the CUDA context and of other processes.

    Attributes:
        used_bytes: What is handed out, ``context_bytes`` apart.

    >>> memory = DeviceMemory(capacity_bytes=3 * 2**20)
    >>> memory.allocate(2 * 2**20) == 0x7F0000000000, memory.allocate(2 * 2**20)
    (True, None)
    """

    __slots__ = ("_next_address", "capacity_bytes", "context_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int | None = None, context_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        self.used_bytes = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are left; None without a capacity."""
        if self.capacity_bytes is None:
            return None
        return max(self.capacity_bytes - self.context_bytes - self.used_bytes, 0)

    def allocate(self, nbytes: int) -> int | None:
        """``cudaMalloc``: an address, or None where so much is not left."""
        return self.reserve_addresses(nbytes) if self.take(nbytes) else None

    def take(self, nbytes: int) -> bool:
        """``cuMemCreate``: physical memory for addresses that are reserved already."""
        free_bytes = self.free_bytes
        if free_bytes is not None and nbytes > free_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def reserve_addresses(self, nbytes: int) -> int:
        """``cuMemAddressReserve``: the first of so many addresses, without memory behind them."""
        address = self._next_address
        self._next_address += (nbytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
        return address


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, allocated or free."""

    address: int  # where it begins
    size: int  # its bytes, the slack behind the request included
    stream: int  # the stream for which it was allocated; others never get it
    pool: BlockPool  # where it waits when it is free
    requested_bytes: int = 0  # what was asked for
    allocated: bool = False  # whether it is in use
    # whether memory lies behind its addresses; only blocks of an expandable segment can be
    # without
    mapped: bool = True
    previous: Block | None = None  # the block before it in its segment
    next: Block | None = None  # the block behind it
    # the expandable segment it lies in; None for a segment of ``cudaMalloc``
    segment: ExpandableSegment | None = None

    @property
    def is_split(self) -> bool:
        """True of a block that is less than its whole segment."""
        return self.previous is not None or self.next is not None

    @property
    def growable_bytes(self) -> int:
        """Its bytes, and the addresses behind it that have no memory yet."""
        behind = self.next
        return self.size + (behind.size if behind is not None and not behind.mapped else 0)

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
    """A range of addresses behind which pages of memory are mapped as they are needed."""

    address: int  # where the range begins
    size: int  # bytes of the range
    page_bytes: int  # what is mapped and unmapped at once

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

    def add_unmapped(self, block: Block) -> None:
        """Put a block without memory where its address belongs."""
        insort(self.unmapped, (block.stream, block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Take a block without memory out."""
        del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


class TraceAction(str, Enum):
    """Action of an allocator, in the words of ``torch.cuda.memory._snapshot``."""

    ALLOC = "alloc"
    FREE = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of an allocator's trace."""

    action: TraceAction  # what happened
    address: int  # where; for OOM, the bytes that the device had left
    # the request of an allocation or free; the size of a segment or of its pages; for OOM,
    # the size of the block that was not to be had
    nbytes: int
    stream: int  # for which stream


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a segment."""

    address: int  # where it begins
    size: int  # its bytes
    requested_bytes: int  # what was asked for; 0 where it is free
    allocated: bool  # whether it is in use


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Memory that lies in one piece: a segment of ``cudaMalloc``, or pages next to each other."""

    address: int  # where it begins
    size: int  # its bytes, the sum of its blocks
    stream: int  # for which stream
    is_small: bool  # whether it belongs to the small pool
    is_expandable: bool  # whether it is part of an expandable segment
    blocks: tuple[BlockState, ...]  # in the order of their addresses, without gaps


class Heap:
    """The state of a caching allocator.

    Attributes:
        memory: The device.
        small: Free blocks of at most 1 MiB.
        large: The other free blocks.
        heads: The first block of every segment, expandable ones included.
        reserved_bytes: Sum of the segments.
    """

    def __init__(self, memory: DeviceMemory, trace: Callable[[TraceEvent], None] | None) -> None:
        self.memory = memory
        self.small = BlockPool(is_small=True)
        self.large = BlockPool(is_small=False)
        self.heads: set[Block] = set()
        self.reserved_bytes = 0
        self._trace = trace

    def record(self, action: TraceAction, address: int, nbytes: int, stream: int) -> None:
        """Report an event to the listener."""
        if self._trace is not None:
            self._trace(TraceEvent(action, address, nbytes, stream))

    def give_back(self, nbytes: int) -> None:
        """Give memory back to the device (``cudaFree`` and ``cuMemRelease``)."""
        self.reserved_bytes -= nbytes
        self.memory.used_bytes -= nbytes

    def add_segment(self, nbytes: int, stream: int, pool: BlockPool) -> Block | None:
        """A new segment as one block that is in no pool; None where the device has no memory."""
        address = self.memory.allocate(nbytes)
        if address is None:
            return None
        self.reserved_bytes += nbytes
        self.record(TraceAction.SEGMENT_ALLOC, address, nbytes, stream)
        block = Block(address, nbytes, stream, pool)
        self.heads.add(block)
        return block

    def release_segment(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the device (``release_block``)."""
        block.pool.remove(block)
        self.heads.remove(block)
        self.give_back(block.size)
        self.record(TraceAction.SEGMENT_FREE, block.address, block.size, block.stream)

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Join a block that is in no pool with a free neighbour (``try_merge_blocks``)."""
        if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
            return
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

    def add_expandable(self, stream: int, pool: BlockPool, page_bytes: int) -> Block:
        """A new range of addresses, 9/8 of the device's memory, as one block without memory.

        Source: the constructor of ``ExpandableSegment`` in ``CUDACachingAllocator.cpp``.
        """
        capacity_bytes = self.memory.capacity_bytes
        room = _ADDRESS_SPACE_BYTES if capacity_bytes is None else capacity_bytes * 9 // 8
        size = -(-room // page_bytes) * page_bytes
        segment = ExpandableSegment(self.memory.reserve_addresses(size), size, page_bytes)
        block = Block(segment.address, size, stream, pool, mapped=False, segment=segment)
        self.heads.add(block)
        pool.add_unmapped(block)
        return block

    def snapshot(self) -> tuple[SegmentState, ...]:
        """All that is reserved, in the order of the addresses.

        Source of the pieces: ``DeviceCachingAllocator::snapshot``.
        """
        segments = []
        for head in sorted(self.heads, key=lambda block: block.address):
            blocks = [head]
            while (behind := blocks[-1].next) is not None:
                blocks.append(behind)
            for mapped, group in groupby(blocks, key=lambda block: block.mapped):
                states = tuple(
                    BlockState(b.address, b.size, b.allocated * b.requested_bytes, b.allocated)
                    for b in group
                )
                if mapped:
                    segments.append(
                        SegmentState(
                            address=states[0].address,
                            size=sum(state.size for state in states),
                            stream=head.stream,
                            is_small=head.pool.is_small,
                            is_expandable=head.segment is not None,
                            blocks=states,
                        )
                    )
        return tuple(segments)

"""What the caching allocator makes of a step: reserved memory, slack, and where it runs out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxmem.memory.allocator.blocks import Block
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.memory import DeviceMemory
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.timeline import Event

BEFORE_FIRST = -1
"""The index of an event for what was there before the first one."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The first highest value of a counter.

    Attributes:
        nbytes: The value.
        event: Index of the event after which it was reached, or :data:`BEFORE_FIRST`.
    """

    nbytes: int
    event: int


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What is reserved and not allocated.

    Attributes:
        unallocated_bytes: All of it.
        free_blocks: In how many pieces.
        largest_free_bytes: The largest of them.
        inactive_split_bytes: What lies in segments that are partly in use, so that no flush of
            the cache gives it back; expandable segments, whose pages can go, apart.
    """

    unallocated_bytes: int
    free_blocks: int
    largest_free_bytes: int
    inactive_split_bytes: int


@dataclass(frozen=True, slots=True)
class AllocatorProfile:
    """What a caching allocator held during a step.

    Attributes:
        allocated_bytes: Sum of the blocks in use after each event.
        requested_bytes: What was asked for of them, after each event.
        reserved_bytes: What was held of the device's memory after each event.
        peak_allocated: The most that was allocated in the step.
        peak_requested: The most that was asked for.
        peak_reserved: The most that was reserved.
        fragmentation: What of that was not allocated at that moment.
        retries: How often the cache was flushed because the device had no memory left: each one
            waits for the device, and the segments come back one by one.
        shortage: The request that did not fit, if any. The events end before it, so its index
            is ``len(allocated_bytes)``, or it lies before the first event (``in_warmup``).
        in_warmup: Whether memory ran out before the first event.
    """

    allocated_bytes: tuple[int, ...]
    requested_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    peak_allocated: Peak
    peak_requested: Peak
    peak_reserved: Peak
    fragmentation: Fragmentation
    retries: int = 0
    shortage: Shortage | None = None
    in_warmup: bool = False


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    context_bytes: int = 0,
    warmup: Iterable[tuple[int | None, int]] = (),
) -> AllocatorProfile:
    """Run the allocations and frees of a step through the caching allocator.

    Args:
        events: Those of a :class:`~fxmem.memory.timeline.Timeline`.
        settings: The allocator's; the defaults where None.
        capacity_bytes: Total memory of the device; without one it never runs out.
        context_bytes: What the CUDA context and other processes take of it.
        warmup: What led to the step, as :attr:`~fxmem.graph.MemoryGraph.warmup` has it: storage
            and bytes, negative where it is freed. A storage that is freed in the step and was
            not allocated in it has to be there.

    Raises:
        UsageError: A memory fraction without a capacity.
        ValueError: A storage is freed that was not allocated, or allocated twice.
    """
    allocator = CachingAllocator(settings, DeviceMemory(capacity_bytes, context_bytes))
    blocks: dict[tuple[int | None, int], Block | None] = {}
    samples: list[tuple[int, int, int]] = []
    shortage, fragmentation, most_bytes = None, _measure_fragmentation(allocator), 0
    try:
        for storage, delta_bytes in warmup:
            _change(allocator, blocks, (storage, 0), delta_bytes)
        samples.append(_sample(allocator))
        for event in events:
            if allocator.reserved_bytes > most_bytes:
                most_bytes = allocator.reserved_bytes
                fragmentation = _measure_fragmentation(allocator)
            _change(allocator, blocks, (event.storage, event.block), event.delta_bytes)
            samples.append(_sample(allocator))
    except OutOfMemory as error:
        shortage = error.shortage
    if allocator.reserved_bytes > most_bytes:
        fragmentation = _measure_fragmentation(allocator)
    allocated, requested, reserved = zip(*(samples or [_sample(allocator)]), strict=True)
    return AllocatorProfile(
        allocated_bytes=allocated[1:],
        requested_bytes=requested[1:],
        reserved_bytes=reserved[1:],
        peak_allocated=_find_peak(allocated),
        peak_requested=_find_peak(requested),
        peak_reserved=_find_peak(reserved),
        fragmentation=fragmentation,
        retries=allocator.retries,
        shortage=shortage,
        in_warmup=not samples,
    )


def _change(
    allocator: CachingAllocator,
    blocks: dict[tuple[int | None, int], Block | None],
    owner: tuple[int | None, int],
    delta_bytes: int,
) -> None:
    """Allocate or free a storage, or the block of a kernel with that number where it is None."""
    if delta_bytes > 0:
        if owner in blocks:
            raise ValueError(f"storage {owner[0]} is allocated twice")
        blocks[owner] = allocator.allocate(delta_bytes)
    elif delta_bytes < 0:
        if owner not in blocks:
            raise ValueError(f"storage {owner[0]} is freed but was not allocated")
        allocator.free(blocks.pop(owner))


def _sample(allocator: CachingAllocator) -> tuple[int, int, int]:
    return allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes


def _measure_fragmentation(allocator: CachingAllocator) -> Fragmentation:
    return Fragmentation(
        unallocated_bytes=allocator.reserved_bytes - allocator.allocated_bytes,
        free_blocks=allocator.free_blocks,
        largest_free_bytes=allocator.largest_free_bytes,
        inactive_split_bytes=allocator.inactive_split_bytes,
    )


def _find_peak(values: tuple[int, ...]) -> Peak:
    """The first highest value; the first value of all is from before the first event."""
    most = max(values)
    return Peak(most, values.index(most) + BEFORE_FIRST)

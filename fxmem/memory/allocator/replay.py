"""A step's allocations and frees, run through the caching allocator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.heap import Block, DeviceMemory
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.timeline import Action, Event


@dataclass(frozen=True, slots=True)
class AllocatorProfile:
    """Memory that a caching allocator held during a step."""

    allocated_bytes: tuple[int, ...]  # sum of the blocks in use after each event
    requested_bytes: tuple[int, ...]  # what was asked for of them, after each event
    reserved_bytes: tuple[int, ...]  # what was held of the device's memory after each event
    # how often the cache was flushed because the device had no memory left: each one waits
    # for the device, and the segments come back one by one
    retries: int = 0
    # the request that did not fit, if any. The events end before it, so its index is
    # ``len(allocated_bytes)``.
    shortage: Shortage | None = None


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    context_bytes: int = 0,
) -> AllocatorProfile:
    """Runs allocations and frees through the caching allocator.

    Args:
        events: The events of a :class:`~fxmem.memory.timeline.Timeline`.
        settings: The allocator's; the defaults where None.
        capacity_bytes: Total memory of the device; without one it never runs out.
        context_bytes: The share of the CUDA context and of other processes.

    Raises:
        UsageError: A memory fraction without a capacity.
    """
    allocator = CachingAllocator(settings, DeviceMemory(capacity_bytes, context_bytes))
    samples: list[tuple[int, int, int]] = []
    shortage = None
    try:
        for _ in run_events(events, allocator):
            samples.append(
                (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes)
            )
    except OutOfMemory as error:
        shortage = error.shortage
    allocated, requested, reserved = zip(*samples, strict=True) if samples else ((), (), ())
    return AllocatorProfile(allocated, requested, reserved, allocator.retries, shortage)


def run_events(
    events: Iterable[Event], allocator: CachingAllocator
) -> Iterator[dict[tuple[int | None, int], Block | None]]:
    """Allocates and frees; yields after each event the blocks in use, by storage and number."""
    blocks: dict[tuple[int | None, int], Block | None] = {}
    for event in events:
        owner = event.storage, event.block
        if event.nbytes and event.action is Action.ALLOC:
            blocks[owner] = allocator.allocate(event.nbytes, stream=event.stream)
        elif event.nbytes:
            allocator.free(blocks.pop(owner))
        elif event.action is Action.EMPTY:
            allocator.empty_cache()
        yield blocks

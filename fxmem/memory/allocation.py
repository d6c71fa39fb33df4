"""Allocation of a step's memory by a caching allocator.

A step's events are replayed after everything before it, from the model's move to the device on:
the cache that the step before left decides which block a tensor gets, and how large it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fxmem.graph import (
    NEXT_RESULT,
    RESIDENT,
    FirstOperation,
    MemoryGraph,
    Operation,
    Phase,
    SourceLocation,
    measure_blocks,
)
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.heap import (
    Block,
    BlockState,
    DeviceMemory,
    SegmentState,
    TraceAction,
    TraceEvent,
)
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.timeline import Action, Event, build_timeline

_ACTIONS = (Action.FREE, Action.ALLOC)
_EMPTIED = (None, 0)
"""An event of :attr:`MemoryGraph.warmup` that empties the cache."""
_FIRST_ADDRESS = 0x7F00_0000_0000
_ALIGNMENT_BYTES = 64
"""Alignment of the CPU's allocator (``c10/core/alignment.h``, ``gAlignment``)."""


@dataclass(frozen=True, slots=True)
class WarmupPeak:
    """The peak before a step, from the model's move to the device on."""

    allocated_bytes: int  # most allocated bytes
    reserved_bytes: int  # most bytes that the allocator holds of the device
    requested_bytes: int  # most requested bytes in use
    # index in :attr:`MemoryGraph.warmup` of the first event that reaches ``allocated_bytes``;
    # negative for what was there before all else
    event: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A step as the allocator serves it, on a device of unlimited memory."""

    graph: MemoryGraph  # the memory graph, sized by blocks instead of requests
    # bytes that the allocator holds, after each event of the timeline
    reserved_bytes: tuple[int, ...]
    requested_bytes: tuple[int, ...]  # requested bytes in use, after each event
    warmup: WarmupPeak | None = None  # the peak before the step; None without events before it
    start_reserved_bytes: int = 0  # what the allocator holds when the step begins


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """Where a device runs out of memory."""

    cause: str  # the request that did not fit, in the allocator's words
    step: int | None  # index of its operation; None before the step
    # the part of either step; None while model and inputs move to the device
    phase: Phase | None = None
    node: str | None = None  # name of the node there, or None
    source: SourceLocation | None = None  # the user's own line, or None
    # name of the requested storage, where it is resident in the step: a parameter, an input,
    # a part of the optimizer's state; else empty
    storage: str = ""
    # whether memory runs out however much the CUDA context takes; else only if it takes the
    # most that was ever measured
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """A step on a device of limited memory."""

    exhaustion: Exhaustion | None  # where memory runs out; None where the step fits
    reserved_bytes: int  # most bytes that the allocator holds in the step
    retries: int  # how often the allocator freed its cache to make room, from the model's move on


@dataclass(frozen=True, slots=True)
class Placement:
    """The index, address and requested bytes of a resident storage."""

    storage: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AddressTrace:
    """The addresses of a step's blocks, and the allocator's events."""

    residents: tuple[Placement, ...]  # the resident storages, in segments that were there before
    # the allocator's events, each with the index of the timeline's event that causes it;
    # storages without bytes take no block
    events: tuple[tuple[TraceEvent, int], ...]
    segments: tuple[SegmentState, ...]  # the segments in the end


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


def allocate_graph(graph: MemoryGraph, settings: AllocatorSettings) -> Allocation:
    """Gives each storage and workspace of a step its block."""
    events, first = list_events(graph)
    profile = replay(events, settings)
    sizes = [storage.nbytes for storage in graph.storages]
    workspaces: dict[int, dict[int, int]] = {}
    before = 0
    for event, after in zip(events, profile.allocated_bytes, strict=True):
        if event.action is Action.ALLOC:
            if event.storage is not None and event.storage >= 0:
                sizes[event.storage] = after - before
            elif event.storage is None and event.step >= 0:
                workspaces.setdefault(event.step, {})[event.block] = after - before
        before = after
    series = profile.allocated_bytes, profile.reserved_bytes, profile.requested_bytes
    return Allocation(
        _resize(graph, sizes, workspaces),
        profile.reserved_bytes[first:],
        profile.requested_bytes[first:],
        _find_warmup_peak(graph, *(values[:first] for values in series)),
        profile.reserved_bytes[first - 1] if first else 0,
    )


def find_warmup_peak(graph: MemoryGraph) -> WarmupPeak | None:
    """Finds the peak before a step, where no allocator rounds or caches."""
    events, first = list_events(graph)
    live_bytes = tuple(accumulate(event.delta_bytes for event in events[:first]))
    return _find_warmup_peak(graph, live_bytes, live_bytes, live_bytes)


def _find_warmup_peak(
    graph: MemoryGraph, allocated: Sequence[int], reserved: Sequence[int], requested: Sequence[int]
) -> WarmupPeak | None:
    if not graph.warmup:
        return None
    event = allocated.index(max(allocated)) - (len(allocated) - len(graph.warmup))
    return WarmupPeak(max(allocated), max(reserved), max(requested), event)


def measure_allocation(graph: MemoryGraph, settings: AllocatorSettings) -> tuple[int, int]:
    """Measures the most allocated and the most reserved bytes of a step, without a graph."""
    events, first = list_events(graph)
    profile = replay(events, settings)
    start = max(first - 1, 0)  # what there was when the step began
    return max(profile.allocated_bytes[start:]), max(profile.reserved_bytes[first:])


def run_on_device(
    graph: MemoryGraph, settings: AllocatorSettings, capacity_bytes: int, context_bytes: int
) -> DeviceRun:
    """Replays a step, after what led to it, in a device's memory.

    Args:
        graph: The step, in requested bytes.
        settings: Settings of the allocator.
        capacity_bytes: All memory of the device.
        context_bytes: Memory of the CUDA context.
    """
    events, first = list_events(graph)
    profile = replay(events, settings, capacity_bytes=capacity_bytes, context_bytes=context_bytes)
    reserved_bytes = profile.reserved_bytes[first:] or profile.reserved_bytes[-1:]
    exhaustion = None
    if profile.shortage is not None:
        failed = len(profile.allocated_bytes)
        cause = OutOfMemory(profile.shortage).cause
        exhaustion = _locate(graph, events[failed], failed - first + len(graph.warmup), cause)
    return DeviceRun(exhaustion, max(reserved_bytes, default=0), profile.retries)


def _locate(graph: MemoryGraph, event: Event, index: int, cause: str) -> Exhaustion:
    """Locates a request that did not fit; its index is in the warmup, if it was before the step."""
    phase, node, step = None, None, None
    if event.step >= 0:
        operation = graph.operations[event.step]
        phase, node, step = operation.phase, operation.node, event.step
    elif (first := find_first_operation(graph, index)) is not None:
        phase = first.phase
        node = None if first.twin is None else graph.operations[first.twin].node
    made = None if node is None else graph.nodes[node]
    return Exhaustion(
        cause,
        step,
        phase,
        None if made is None else made.name,
        None if made is None else made.source,
        "" if event.storage is None or event.storage < 0 else graph.storages[event.storage].name,
    )


def find_first_operation(graph: MemoryGraph, event: int) -> FirstOperation | None:
    """Finds the operator of the first step that an event of the warmup belongs to, if any."""
    starts = [operation.start for operation in graph.first_operations]
    rank = bisect_right(starts, event) - 1
    return graph.first_operations[rank] if rank >= 0 else None


def trace_blocks(graph: MemoryGraph, settings: AllocatorSettings | None) -> AddressTrace:
    """Traces the addresses of each storage and workspace of a step.

    Args:
        graph: The step, in requested bytes.
        settings: Settings of the caching allocator. None for the CPU's, which caches nothing:
            each block is a segment of its own at an address that is never used again.
    """
    return _trace_heap(graph) if settings is None else _trace_cache(graph, settings)


def _trace_cache(graph: MemoryGraph, settings: AllocatorSettings) -> AddressTrace:
    events, first = list_events(graph)
    seen: list[TraceEvent] = []
    allocator = CachingAllocator(settings, trace=seen.append)
    trace: list[tuple[TraceEvent, int]] = []
    residents: tuple[Placement, ...] = ()
    for index, blocks in enumerate(run_events(events, allocator), -first):
        if index == -1:
            residents = tuple(
                Placement(storage, block.address, block.requested_bytes)
                for (storage, _), block in blocks.items()
                if storage is not None and block is not None
            )
        if index >= 0:
            trace += [(happened, index) for happened in seen]
        seen.clear()
    return AddressTrace(residents, tuple(trace), allocator.snapshot())


def _trace_heap(graph: MemoryGraph) -> AddressTrace:
    end, places = _FIRST_ADDRESS, dict[tuple[int | None, int], tuple[int, int]]()

    def place(owner: tuple[int | None, int], nbytes: int) -> int:
        nonlocal end
        address, end = end, end + -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        places[owner] = address, nbytes
        return address

    residents = tuple(
        Placement(storage.index, place((storage.index, 0), storage.nbytes), storage.nbytes)
        for storage in graph.storages
        if storage.born == RESIDENT and storage.nbytes
    )
    trace: list[tuple[TraceEvent, int]] = []
    for index, event in enumerate(build_timeline(graph).events):
        if not event.nbytes:
            continue
        if event.action is Action.ALLOC:
            address = place((event.storage, event.block), event.nbytes)
            actions = TraceAction.SEGMENT_ALLOC, TraceAction.ALLOC
        else:
            address, _ = places.pop((event.storage, event.block))
            actions = TraceAction.FREE, TraceAction.SEGMENT_FREE
        trace += [(TraceEvent(action, address, event.nbytes, 0), index) for action in actions]
    segments = tuple(
        SegmentState(address, nbytes, 0, False, False, (BlockState(address, nbytes, nbytes, True),))
        for address, nbytes in sorted(places.values())
    )
    return AddressTrace(residents, tuple(trace), segments)


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
    events: Iterable[Event],
    allocator: CachingAllocator,
    blocks: dict[tuple[int | None, int], Block | None] | None = None,
) -> Iterator[dict[tuple[int | None, int], Block | None]]:
    """Allocates and frees; yields after each event the blocks in use, by storage and number.

    Args:
        events: What happens.
        allocator: Serves it.
        blocks: What is in use before, which is changed; None for nothing.
    """
    blocks = {} if blocks is None else blocks
    for event in events:
        owner = event.storage, event.block
        if event.nbytes and event.action is Action.ALLOC:
            blocks[owner] = allocator.allocate(event.nbytes, stream=event.stream)
        elif event.nbytes:
            allocator.free(blocks.pop(owner))
        elif event.action is Action.EMPTY:
            allocator.empty_cache()
        yield blocks


def list_events(graph: MemoryGraph) -> tuple[tuple[Event, ...], int]:
    """Lists the events before the step and of the step, and the index of the step's first event.

    Storages that nobody saw being allocated come first.
    """
    seen = {storage for storage, _ in graph.warmup}
    unseen = [
        (storage.index, storage.nbytes)
        for storage in graph.storages
        if storage.born == RESIDENT and storage.index not in seen
    ]
    streams: dict[int | None, int] = dict(graph.warmup_streams)
    streams.update((storage.index, storage.stream) for storage in graph.storages if storage.stream)
    led = tuple(
        Event(Action.EMPTY, 0, None, -1, Phase.FORWARD)
        if (name, nbytes) == _EMPTIED
        else Event(
            _ACTIONS[nbytes > 0], abs(nbytes), name, -1, Phase.FORWARD, stream=streams.get(name, 0)
        )
        for name, nbytes in (*unseen, *graph.warmup)
    )
    return led + build_timeline(graph).events, len(led)


def _resize(
    graph: MemoryGraph, sizes: Sequence[int], workspaces: Mapping[int, Mapping[int, int]]
) -> MemoryGraph:
    results: dict[int, list[int]] = {}
    for storage, size in zip(graph.storages, sizes, strict=True):
        results.setdefault(storage.born, []).append(size)
    return replace(
        graph,
        storages=tuple(
            replace(storage, nbytes=size, slack_bytes=size - storage.nbytes)
            for storage, size in zip(graph.storages, sizes, strict=True)
        ),
        operations=tuple(
            _resize_workspace(operation, taken, results.get(operation.index, ()))
            if (taken := workspaces.get(operation.index))
            else operation
            for operation in graph.operations
        ),
    )


def _resize_workspace(
    operation: Operation, sizes: Mapping[int, int], results: Sequence[int]
) -> Operation:
    if not operation.blocks:
        return replace(operation, workspace_bytes=sizes[0])
    blocks = tuple(
        (block, nbytes if block == NEXT_RESULT else sizes[block] * (1 if nbytes > 0 else -1))
        for block, nbytes in operation.blocks
    )
    return replace(operation, blocks=blocks, workspace_bytes=measure_blocks(blocks, results))

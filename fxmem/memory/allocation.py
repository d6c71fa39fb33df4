"""A step's memory as a caching allocator hands it out.

The events of a step are replayed after those that led to it, from the model's move to the device
on: what the step before left in the cache decides which block a tensor gets, and how large it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
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
from fxmem.memory.allocator import (
    AllocatorSettings,
    Block,
    BlockState,
    CachingAllocator,
    OutOfMemory,
    SegmentState,
    TraceAction,
    TraceEvent,
    replay,
)
from fxmem.memory.timeline import Action, Event, build_timeline

_BEFORE = -1
"""The step of an event that led to the step."""
_FIRST_ADDRESS = 0x7F00_0000_0000
_ALIGNMENT_BYTES = 64
"""Of what the CPU's allocator hands out (``c10/core/alignment.h``, ``gAlignment``)."""


@dataclass(frozen=True, slots=True)
class WarmupPeak:
    """The most that is in use before a step, from the model's move to the device on.

    Attributes:
        allocated_bytes: As the allocator hands it out.
        reserved_bytes: The most that it holds of the device.
        requested_bytes: The most that is in use as it was asked for.
        event: Index in :attr:`MemoryGraph.warmup` of the first event that reaches
            ``allocated_bytes``; negative for what was there before all else.
    """

    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    event: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the allocator made of a step, on a device whose memory has no end.

    Attributes:
        graph: The memory graph with the sizes of blocks in place of those of requests.
        reserved_bytes: What the allocator holds of the device, after each event of the timeline.
        requested_bytes: What is in use, as it was asked for, after each event.
        warmup: The peak of what led to the step; None where nothing did.
    """

    graph: MemoryGraph
    reserved_bytes: tuple[int, ...]
    requested_bytes: tuple[int, ...]
    warmup: WarmupPeak | None = None


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """Where a device runs out of memory.

    Attributes:
        cause: Which request did not fit, in the allocator's words.
        step: Index of its operation; None in the step that led to this one, or before.
        phase: The part of either step; None while model and inputs move to the device.
        node: Name of the node there, or None.
        source: The user's own line, or None.
        storage: Name of the storage that was asked for, where it is still there in the step:
            a parameter, an input, a part of the optimizer's state; else empty.
        is_certain: Whether memory runs out whatever the CUDA context takes of it; else only if
            that takes the most that is known of it.
    """

    cause: str
    step: int | None
    phase: Phase | None = None
    node: str | None = None
    source: SourceLocation | None = None
    storage: str = ""
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """What becomes of a step on a device whose memory ends.

    Attributes:
        exhaustion: Where that runs out; None where the step fits.
        reserved_bytes: The most that the allocator holds in the step.
        retries: How often it gave back its cache to make room, from the model's move on.
    """

    exhaustion: Exhaustion | None
    reserved_bytes: int
    retries: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a storage lies that was there before a step.

    Attributes:
        storage: Its index.
        address: Where.
        nbytes: What was asked for.
    """

    storage: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Where the blocks of a step lie, and what the allocator does.

    Attributes:
        residents: What was there before, in segments that were there too.
        events: What the allocator does, each with the index of the timeline's event that makes
            it do so; storages without bytes take no block.
        segments: What it holds in the end.
    """

    residents: tuple[Placement, ...]
    events: tuple[tuple[TraceEvent, int], ...]
    segments: tuple[SegmentState, ...]


def allocate_graph(graph: MemoryGraph, settings: AllocatorSettings) -> Allocation:
    """Gives each storage and workspace of a step its block.

    Args:
        graph: The step, with what led to it.
        settings: Those of the allocator.
    """
    events, first = _list_events(graph)
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
    return Allocation(
        _resize(graph, sizes, workspaces),
        profile.reserved_bytes[first:],
        profile.requested_bytes[first:],
        _find_warmup_peak(
            graph,
            profile.allocated_bytes[:first],
            profile.reserved_bytes[:first],
            profile.requested_bytes[:first],
        ),
    )


def find_warmup_peak(graph: MemoryGraph) -> WarmupPeak | None:
    """The peak of what led to a step, where no allocator rounds or caches; None where nothing did.

    Args:
        graph: The step.
    """
    events, first = _list_events(graph)
    live_bytes = tuple(accumulate(event.delta_bytes for event in events[:first]))
    return _find_warmup_peak(graph, live_bytes, live_bytes, live_bytes)


def _find_warmup_peak(
    graph: MemoryGraph,
    allocated_bytes: Sequence[int],
    reserved_bytes: Sequence[int],
    requested_bytes: Sequence[int],
) -> WarmupPeak | None:
    if not graph.warmup:
        return None
    peak_bytes = max(allocated_bytes)
    event = allocated_bytes.index(peak_bytes) - (len(allocated_bytes) - len(graph.warmup))
    return WarmupPeak(peak_bytes, max(reserved_bytes), max(requested_bytes), event)


def measure_allocation(graph: MemoryGraph, settings: AllocatorSettings) -> tuple[int, int]:
    """The most that is allocated in a step, and the most that is reserved.

    The same numbers as from :func:`allocate_graph`, without a graph.

    Args:
        graph: The step, with what led to it.
        settings: Those of the allocator.
    """
    events, first = _list_events(graph)
    profile = replay(events, settings)
    start = max(first - 1, 0)  # what there was when the step began
    return max(profile.allocated_bytes[start:]), max(profile.reserved_bytes[first:])


def find_exhaustion(
    graph: MemoryGraph, settings: AllocatorSettings, capacity_bytes: int, context_bytes: int
) -> Exhaustion | None:
    """Where a step runs out of a device's memory; None where it fits.

    The arguments are those of :func:`run_on_device`.
    """
    return run_on_device(graph, settings, capacity_bytes, context_bytes).exhaustion


def run_on_device(
    graph: MemoryGraph, settings: AllocatorSettings, capacity_bytes: int, context_bytes: int
) -> DeviceRun:
    """Replays a step, after what led to it, in a device's memory.

    Args:
        graph: The step, with what led to it, with the sizes of requests.
        settings: Those of the allocator.
        capacity_bytes: All memory of the device.
        context_bytes: What the CUDA context takes of it.
    """
    events, first = _list_events(graph)
    profile = replay(events, settings, capacity_bytes=capacity_bytes, context_bytes=context_bytes)
    exhaustion = None
    if profile.shortage is not None:
        failed = len(profile.allocated_bytes)
        cause = OutOfMemory(profile.shortage).cause
        exhaustion = _locate(graph, events[failed], failed - first + len(graph.warmup), cause)
    return DeviceRun(exhaustion, max(profile.reserved_bytes[first:], default=0), profile.retries)


def _locate(graph: MemoryGraph, event: Event, index: int, cause: str) -> Exhaustion:
    """Where a request was made that did not fit.

    Args:
        graph: The step, with what led to it.
        event: The request.
        index: Its index in :attr:`MemoryGraph.warmup`, if it led to the step.
        cause: Why it did not fit.
    """
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
    """The operator of the first step that an allocation belongs to; None for what was before it.

    Args:
        graph: The step, with what led to it.
        event: Index in :attr:`MemoryGraph.warmup`.
    """
    starts = [operation.start for operation in graph.first_operations]
    rank = bisect_right(starts, event) - 1
    return graph.first_operations[rank] if rank >= 0 else None


def trace_blocks(graph: MemoryGraph, settings: AllocatorSettings | None) -> BlockTrace:
    """Where each storage and workspace of a step lies.

    Args:
        graph: The step, with what led to it, with the sizes of requests.
        settings: Those of the caching allocator. None for the CPU's, which caches nothing: there,
            each block is a segment of its own at an address that is never used again.
    """
    return _trace_heap(graph) if settings is None else _trace_cache(graph, settings)


def _trace_cache(graph: MemoryGraph, settings: AllocatorSettings) -> BlockTrace:
    events, first = _list_events(graph)
    seen: list[TraceEvent] = []
    allocator = CachingAllocator(settings, trace=seen.append)
    blocks: dict[tuple[int | None, int], Block | None] = {}
    trace: list[tuple[TraceEvent, int]] = []
    residents: tuple[Placement, ...] = ()
    for index, event in enumerate(events, -first):
        owner = event.storage, event.block
        if event.nbytes and event.action is Action.ALLOC:
            blocks[owner] = allocator.allocate(event.nbytes)
        elif event.nbytes:
            allocator.free(blocks.pop(owner))
        if index == -1:
            residents = tuple(
                Placement(storage, block.address, block.requested_bytes)
                for (storage, _), block in blocks.items()
                if storage is not None and block is not None
            )
        if index >= 0:
            trace += [(happened, index) for happened in seen]
        seen.clear()
    return BlockTrace(residents, tuple(trace), allocator.snapshot())


def _trace_heap(graph: MemoryGraph) -> BlockTrace:
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
    return BlockTrace(residents, tuple(trace), segments)


def _list_events(graph: MemoryGraph) -> tuple[tuple[Event, ...], int]:
    """What led to the step, and the step; with the index of the step's first event.

    What nobody saw being allocated was there before all else.
    """
    seen = {storage for storage, _ in graph.warmup}
    unseen = [
        (storage.index, storage.nbytes)
        for storage in graph.storages
        if storage.born == RESIDENT and storage.index not in seen
    ]
    led = tuple(
        Event(
            Action.ALLOC if nbytes > 0 else Action.FREE,
            abs(nbytes),
            storage,
            _BEFORE,
            Phase.FORWARD,
        )
        for storage, nbytes in (*unseen, *graph.warmup)
    )
    return led + build_timeline(graph).events, len(led)


def _resize(
    graph: MemoryGraph, sizes: Sequence[int], workspaces: Mapping[int, Mapping[int, int]]
) -> MemoryGraph:
    """The graph with other sizes: of its storages, and by operation of its kernel's blocks."""
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

"""A step's memory as a caching allocator hands it out.

The events of a step are replayed after those that led to it, from the model's move to the device
on: what the step before left in the cache decides which block a tensor gets, and how large it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxmem.allocator import AllocatorSettings, OutOfMemory, replay
from fxmem.graph import RESIDENT, MemoryGraph, Phase
from fxmem.timeline import Action, Event, build_timeline

_BEFORE = -1
"""The step of an event that led to the step."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the allocator made of a step, on a device whose memory has no end.

    Attributes:
        graph: The memory graph with the sizes of blocks in place of those of requests.
        reserved_bytes: What the allocator holds of the device, after each event of the timeline.
        requested_bytes: What is in use, as it was asked for, after each event.
    """

    graph: MemoryGraph
    reserved_bytes: tuple[int, ...]
    requested_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """Where a device runs out of memory.

    Attributes:
        cause: Which request did not fit, in the allocator's words.
        step: Index of its operation; None in the step that led to this one.
    """

    cause: str
    step: int | None


def allocate_graph(graph: MemoryGraph, settings: AllocatorSettings) -> Allocation:
    """Gives each storage and workspace of a step its block.

    Args:
        graph: The step, with what led to it.
        settings: Those of the allocator.
    """
    events, first = _list_events(graph)
    profile = replay(events, settings)
    sizes = [storage.nbytes for storage in graph.storages]
    workspaces = [operation.workspace_bytes for operation in graph.operations]
    before = 0
    for event, after in zip(events, profile.allocated_bytes, strict=True):
        if event.action is Action.ALLOC:
            if event.storage is not None and event.storage >= 0:
                sizes[event.storage] = after - before
            elif event.storage is None and event.step >= 0:
                workspaces[event.step] = after - before
        before = after
    return Allocation(
        _resize(graph, sizes, workspaces),
        profile.reserved_bytes[first:],
        profile.requested_bytes[first:],
    )


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

    Args:
        graph: The step, with what led to it, with the sizes of requests.
        settings: Those of the allocator.
        capacity_bytes: All memory of the device.
        context_bytes: What the CUDA context takes of it.
    """
    events, _ = _list_events(graph)
    profile = replay(events, settings, capacity_bytes=capacity_bytes, context_bytes=context_bytes)
    if profile.shortage is None:
        return None
    step = events[len(profile.allocated_bytes)].step
    return Exhaustion(OutOfMemory(profile.shortage).cause, step if step >= 0 else None)


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


def _resize(graph: MemoryGraph, sizes: Sequence[int], workspaces: Sequence[int]) -> MemoryGraph:
    return replace(
        graph,
        storages=tuple(
            replace(storage, nbytes=size, slack_bytes=size - storage.nbytes)
            for storage, size in zip(graph.storages, sizes, strict=True)
        ),
        operations=tuple(
            replace(operation, workspace_bytes=size)
            for operation, size in zip(graph.operations, workspaces, strict=True)
        ),
    )

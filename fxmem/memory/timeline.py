"""Allocations and frees of a step, in order, from its memory graph.

Each operation runs as alloc - run - free: its new storages and its workspace are allocated (in the
kernel's own order where :attr:`fxmem.graph.Operation.blocks` states one), the workspace goes when
the kernel returns, and then go the storages whose last holder let go before the next operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from fxmem.graph import EMPTY_CACHE, NEXT_RESULT, RESIDENT, MemoryGraph, Operation, Phase, Storage


class Action(str, Enum):
    """Kind of an event."""

    ALLOC = "alloc"
    FREE = "free"
    EMPTY = "empty"  # of the allocator's cache


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or free."""

    action: Action  # ALLOC or FREE; EMPTY without bytes
    nbytes: int  # its size, positive for both
    storage: int | None  # index of the storage, or None for the workspace of a kernel
    step: int  # index of the operation in which it happens
    phase: Phase  # that operation's phase
    block: int = 0  # which of the kernel's blocks a workspace is
    stream: int = 0  # number of the CUDA stream that it is allocated on

    @property
    def delta_bytes(self) -> int:
        """Change of the live bytes."""
        return self.nbytes if self.action is Action.ALLOC else -self.nbytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one step."""

    # live before the first event: parameters, buffers, inputs, optimizer state and whatever
    # else survived the step before
    resident_bytes: int
    events: tuple[Event, ...]  # in order
    steps: int  # how many operations the step has

    def profile(self) -> tuple[int, ...]:
        """The most bytes that are live during each step.

        Returns:
            One number for each operation of the memory graph.
        """
        most = [0] * self.steps
        live, at = self.resident_bytes, 0
        for event in self.events:
            while at <= event.step:  # a step without events of its own holds what was live
                most[at], at = live, at + 1
            live += event.delta_bytes
            most[event.step] = max(most[event.step], live)
        most[at:] = [live] * (self.steps - at)
        return tuple(most)

    def live_bytes(self) -> tuple[int, ...]:
        """The live bytes after each event."""
        deltas = (event.delta_bytes for event in self.events)
        return tuple(accumulate(deltas, initial=self.resident_bytes))[1:]


def build_timeline(graph: MemoryGraph) -> Timeline:
    """The events of a memory graph's step, with the lifetimes that were recorded.

    Args:
        graph: A step's memory graph.
    """
    born = _group_by_step(graph.storages, [s.born for s in graph.storages])
    dying = sorted(graph.storages, key=lambda s: s.death_rank)
    died = _group_by_step(dying, [s.died for s in dying])
    events: list[Event] = []
    for operation in graph.operations:
        events += _run_operation(
            operation, born.get(operation.index, ()), died.get(operation.index, ())
        )
    resident_bytes = sum(s.nbytes for s in graph.storages if s.born == RESIDENT)
    return Timeline(resident_bytes, tuple(events), len(graph.operations))


def sum_lives(lives: Iterable[tuple[int, int, int | None]], steps: int) -> list[int]:
    """Sums the bytes that are live during each of a number of steps.

    Args:
        lives: By storage its bytes, the first step (:data:`RESIDENT` for what was there before) and
            the last, None if it outlives them all.
        steps: The number of steps.

    >>> sum_lives([(5, RESIDENT, 1), (2, 1, None)], 3)
    [5, 7, 2]
    """
    deltas = [0] * (steps + 1)
    for nbytes, born, died in lives:
        deltas[max(born, 0)] += nbytes
        if died is not None:
            deltas[died + 1] -= nbytes
    return [*accumulate(deltas[:-1])]


def measure_fall(live_bytes: Sequence[int], gone: Iterable[tuple[int, int, int]]) -> int:
    """Measures how much lower the peak is without some bytes from one step to another.

    >>> measure_fall([1, 9, 7, 8], [(3, 1, 2)])
    1
    """
    changed = [*live_bytes]
    for nbytes, first, last in gone:
        changed[first : last + 1] = (live - nbytes for live in changed[first : last + 1])
    return max(live_bytes) - max(changed)


def _run_operation(
    operation: Operation, allocated: Iterable[Storage], freed: Iterable[Storage]
) -> Iterable[Event]:
    step, phase = operation.index, operation.phase
    if operation.name == EMPTY_CACHE:
        yield Event(Action.EMPTY, 0, None, step, phase)
    if operation.blocks:
        yield from _run_kernel(operation, list(allocated))
    else:
        for storage in allocated:
            yield _make_event(Action.ALLOC, storage, step, phase)
    if operation.workspace_bytes and not operation.blocks:
        yield Event(Action.ALLOC, operation.workspace_bytes, None, step, phase, 0, operation.stream)
        yield Event(Action.FREE, operation.workspace_bytes, None, step, phase, 0, operation.stream)
    for storage in freed:
        yield _make_event(Action.FREE, storage, step, phase)


def _run_kernel(operation: Operation, results: list[Storage]) -> Iterable[Event]:
    step, phase = operation.index, operation.phase
    named = sum(block == NEXT_RESULT for block, _ in operation.blocks)
    at = max(len(results) - named, 0)
    for storage in results[:at]:
        yield _make_event(Action.ALLOC, storage, step, phase)
    for block, nbytes in operation.blocks:
        if block != NEXT_RESULT:
            action = Action.ALLOC if nbytes > 0 else Action.FREE
            yield Event(action, abs(nbytes), None, step, phase, block, operation.stream)
        elif at < len(results):
            yield _make_event(Action.ALLOC, results[at], step, phase)
            at += 1


def _make_event(action: Action, storage: Storage, step: int, phase: Phase) -> Event:
    return Event(action, storage.nbytes, storage.index, step, phase, 0, storage.stream)


def _group_by_step(
    storages: Iterable[Storage], steps: Iterable[int | None]
) -> dict[int | None, list[Storage]]:
    groups: dict[int | None, list[Storage]] = {}
    for storage, step in zip(storages, steps, strict=True):
        groups.setdefault(step, []).append(storage)
    return groups

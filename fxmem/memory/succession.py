"""Steps of different sizes, one after the other, as a caching allocator serves them.

Blocks that the cache keeps of one size seldom suit the next: so it grows, step by step, beyond
what any of the steps takes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, MemoryGraph, Storage
from fxmem.memory.allocation import list_events, run_events
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory
from fxmem.memory.allocator.heap import Block, DeviceMemory
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings
from fxmem.memory.timeline import Event, build_timeline

ALTERNATIVES = ("expandable_segments:True", "roundup_power2_divisions:8")
"""Settings that are tried beside those that a job has."""
_SAME = 1.01


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Memory that an allocator with some settings reserves for a row of steps.

    Attributes:
        alloc_conf: The settings, as in ``PYTORCH_ALLOC_CONF``; empty for those that the job has.
        steps: How many steps there are.
        reserved_bytes: The most bytes that are reserved.
        unused_bytes: As much of them the largest step leaves unused.
        retries: How often the cache was given back to make room.
        failed: The number of the step that runs out of memory; None where none does.
    """

    alloc_conf: str
    steps: int
    reserved_bytes: int
    unused_bytes: int
    retries: int
    failed: int | None


class _Run:
    """One allocator, and the blocks that are in use."""

    def __init__(
        self, begun: MemoryGraph, settings: AllocatorSettings, memory: DeviceMemory
    ) -> None:
        self.allocator = CachingAllocator(settings, memory)
        self.allocated_bytes = self.reserved_bytes = 0
        self.failed: int | None = None
        self._blocks: dict[tuple[int | None, int], Block | None] = {}
        self._before, self._has_run = begun, False

    def run(self, graph: MemoryGraph) -> None:
        """Runs a step; the first one after what led to it.

        Raises:
            OutOfMemory: The step does not fit.
        """
        if not self._has_run:
            events, first = list_events(self._before)
            if operations := self._before.first_operations:
                first += operations[0].start - len(self._before.warmup)
            self._serve(events[:first])
        missing = self._hand_over(self._before, graph)
        if not self._has_run:  # the step makes its gradients, and the states of its optimizer
            late = {each.index for each in missing if each.category is not Category.INPUT}
            self._allocate(each for each in missing if each.index not in late)
            self._serve(each for each in build_timeline(graph).events if each.storage not in late)
            self._allocate(each for each in missing if each.index in late and each.died is None)
        else:
            self._allocate(missing)
            self._serve(build_timeline(graph).events)
        self._before, self._has_run = graph, True

    def _serve(self, events: Iterable[Event]) -> None:
        allocator = self.allocator
        self.allocated_bytes = max(self.allocated_bytes, allocator.allocated_bytes)
        for _ in run_events(events, allocator, self._blocks):
            self.allocated_bytes = max(self.allocated_bytes, allocator.allocated_bytes)
            self.reserved_bytes = max(self.reserved_bytes, allocator.reserved_bytes)

    def _allocate(self, storages: Iterable[Storage]) -> None:
        for each in storages:
            block = self.allocator.allocate(each.nbytes, stream=each.stream)
            self._blocks[each.index, 0] = block

    def _hand_over(self, before: MemoryGraph, graph: MemoryGraph) -> list[Storage]:
        """Gives what outlived the step before to the next one, and frees the rest of it.

        Returns:
            What the next step should find and does not, such as inputs of another size.
        """
        kept: dict[int, dict[str, list[Block]]] = defaultdict(lambda: defaultdict(list))
        for (storage, _), block in self._blocks.items():
            if storage is not None and block is not None:
                name = before.storages[storage].name if storage >= 0 else ""
                kept[block.requested_bytes][name].append(block)
        self._blocks.clear()
        missing: list[Storage] = []
        others: list[Storage] = []
        for each in graph.storages:
            if each.born == RESIDENT and each.nbytes:
                if same := kept[each.nbytes][each.name]:
                    self._blocks[each.index, 0] = same.pop(0)
                else:
                    others.append(each)
        for each in others:  # under another name, or of another size
            if same := next(filter(None, kept[each.nbytes].values()), []):
                self._blocks[each.index, 0] = same.pop(0)
            else:
                missing.append(each)
        for named in kept.values():
            for block in (block for blocks in named.values() for block in blocks):
                self.allocator.free(block)
        return missing


def replay_steps(
    begun: MemoryGraph,
    graphs: Iterable[MemoryGraph],
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    context_bytes: int = 0,
) -> tuple[Fragmentation, ...]:
    """Replays steps of one structure and different sizes, with these settings and with others.

    Args:
        begun: A step that has what leads to the first one.
        graphs: The steps in order, in requested bytes, as they are once there were others.
        settings: Settings of the allocator. :data:`ALTERNATIVES` are tried beside them.
        capacity_bytes: All memory of the device; None has no end.
        context_bytes: Memory of the CUDA context.

    Returns:
        What each allocator reserves; it stops at a step that does not fit.
    """
    tried = {"": settings} | {each: parse_settings(each) for each in ALTERNATIVES}
    runs = {
        alloc_conf: _Run(begun, each, DeviceMemory(capacity_bytes, context_bytes))
        for alloc_conf, each in tried.items()
        if not alloc_conf or each != settings
    }
    steps = 0
    for steps, graph in enumerate(graphs, 1):
        for run in runs.values():
            if run.failed is None:
                try:
                    run.run(graph)
                except OutOfMemory:
                    run.failed = steps
    return tuple(
        Fragmentation(
            alloc_conf,
            steps,
            run.reserved_bytes,
            run.reserved_bytes - run.allocated_bytes,
            run.allocator.retries,
            run.failed,
        )
        for alloc_conf, run in runs.items()
    )


def choose_settings(found: Sequence[Fragmentation]) -> Fragmentation | None:
    """Chooses the settings that reserve the least: the first ones, within 1 % of it.

    Returns:
        None where memory runs out with all of them.
    """
    running = [each for each in found if each.failed is None]
    least = min((each.reserved_bytes for each in running), default=0)
    return next((each for each in running if each.reserved_bytes <= least * _SAME), None)

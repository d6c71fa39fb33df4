"""Exact simulation of a rewritten step, from the step that was recorded."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from fxmem.graph import RESIDENT, Category, MemoryGraph, Phase
from fxmem.memory.timeline import build_timeline, sum_lives
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.recomputation import (
    LiveInterval,
    Run,
    SegmentIntervals,
    SegmentRange,
    iterate_runs,
    plan_runs,
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A rewritten step."""

    step: StepIndex
    order: tuple[tuple[int, bool], ...]  # the operations, each with whether it is recomputed
    lives: tuple[LiveInterval, ...]
    live_bytes: tuple[int, ...]  # for each operation, the most that are live while it runs

    @property
    def recomputed(self) -> Iterator[int]:
        """The operations of forward that run again, each as often as it does."""
        return (index for index, again in self.order if again)


def simulate_segments(step: StepIndex, segments: Sequence[SegmentRange]) -> Simulation:
    """Simulates the step with segments that lie apart from each other and in order."""
    runs = plan_runs(step, segments)
    triggered: dict[int, list[Run]] = {}
    for run in iterate_runs(runs):  # what holds a segment's inputs runs before it
        triggered.setdefault(run.trigger, []).append(run)
    order: list[tuple[int, bool]] = []
    places = []
    for index in range(len(step.graph.operations)):
        for run in triggered.get(index, ()):
            run.base = len(order)
            order += [(again, True) for again in run.list_operations(step)]
        places.append(len(order))
        order.append((index, False))
    lives = tuple(SegmentIntervals(step, segments, runs, places).iterate())
    storages = step.graph.storages
    spans = ((storages[i.storage].nbytes, i.born, i.died) for i in lives)
    workspaces = (step.graph.operations[index].workspace_bytes for index, _ in order)
    live_bytes = tuple(map(add, sum_lives(spans, len(order)), workspaces))
    return Simulation(step, tuple(order), lives, live_bytes)


def build_graph(simulation: Simulation) -> MemoryGraph:
    """Builds the memory graph of a rewritten step."""
    graph = simulation.step.graph
    # Forward is as it was up to the first that runs again, and so is what it holds throughout.
    operations = tuple(
        graph.operations[index]
        if place == index and not again
        else replace(
            graph.operations[index],
            index=place,
            recomputed=again or graph.operations[index].recomputed,
            phase=Phase.BACKWARD if again else graph.operations[index].phase,
        )
        for place, (index, again) in enumerate(simulation.order)
    )
    storages = []
    for index, life in enumerate(simulation.lives):
        storage = graph.storages[life.storage]
        if (storage.index, storage.born, storage.died) != (index, life.born, life.died):
            storage = replace(storage, index=index, born=life.born, died=life.died)
        storages.append(storage)
    rewritten = replace(graph, operations=operations, storages=tuple(storages), saves=())
    warmup, streams = _warm_up(rewritten)
    return replace(rewritten, warmup=warmup, warmup_streams=streams, first_operations=())


def _warm_up(
    graph: MemoryGraph,
) -> tuple[tuple[tuple[int | None, int], ...], tuple[tuple[int, int], ...]]:
    """Lists what led to a rewritten step: all that is resident, and one such step.

    The state of the optimizer comes to be at the end of that step, before it updates anything.
    Gradients that are resident were, in that step, the tensors that are added to them in this one;
    if each step frees them, a micro-batch made them anew before this one.

    Returns:
        What :class:`~fxmem.graph.MemoryGraph` has as ``warmup`` and ``warmup_streams``.
    """
    if not graph.warmup:
        return (), ()
    resident = {s.index: s.nbytes for s in graph.storages if s.born == RESIDENT}
    seen = (index for index, nbytes in graph.warmup if nbytes > 0 and index in resident)
    order = dict.fromkeys(index for index in (*seen, *resident) if index is not None)
    states = [i for i in order if graph.storages[i].category is Category.OPTIMIZER_STATE]
    taken = _find_first_gradients(graph, resident)
    later = {*states, *taken.values()}
    led: list[tuple[int | None, int]] = [(i, resident[i]) for i in order if i not in later]
    made = {index: at for at, (index, nbytes) in enumerate(graph.warmup) if nbytes > 0}
    updated = max((made.get(index, -1) for index in states), default=len(graph.warmup))
    # Gradients that each step frees, and its first micro-batch makes anew.
    freed = [index for index in taken.values() if made.get(index, -1) > updated]
    step = build_timeline(graph).events
    names, streams = dict[tuple[int, int], int](), dict[int, int]()
    micro_batch = [event for event in step if event.phase is not Phase.OPTIMIZER]
    for events in (step, micro_batch) if freed else (step,):
        is_first, held = events is step, dict[int, int]()  # what is allocated, by name
        if not is_first:
            led += [(index, -resident[index]) for index in freed]
        for event in events:
            if event.phase is Phase.OPTIMIZER:
                led += [(index, resident[index]) for index in states]
                states = []
            storage = event.storage
            if storage is None:  # blocks that a kernel holds at the same time need names
                block = event.block, event.stream
                storage = names.setdefault(block, len(graph.storages) + len(names))
            if event.stream:
                streams[~storage] = event.stream
            gradient = taken.get(storage)
            if gradient is not None and (is_first or gradient in freed):
                led += [(gradient, event.delta_bytes)] if event.delta_bytes > 0 else []
            elif storage not in resident:
                led.append((~storage, event.delta_bytes))
                held[storage] = held.get(storage, 0) + event.delta_bytes
        led += [(~storage, -nbytes) for storage, nbytes in held.items() if nbytes]
    return tuple(led), tuple(streams.items())


def _find_first_gradients(graph: MemoryGraph, resident: Container[int]) -> dict[int, int]:
    """Finds the tensors that are added to resident gradients, and were these in the first step.

    Source: ``torch/csrc/autograd/functions/accumulate_grad.h``, ``accumulateGrad``, which takes the
    first tensor itself.
    """
    found: dict[int, int] = {}
    for operation in graph.operations:
        if operation.phase is not Phase.BACKWARD:
            continue
        for gradient in operation.writes:
            kept = graph.storages[gradient]
            if gradient not in resident or kept.category is not Category.GRADIENT:
                continue
            for index in operation.reads:
                added = graph.storages[index]
                if added.died == operation.index and added.nbytes == kept.nbytes:
                    found.setdefault(gradient, index)
    return {index: gradient for gradient, index in found.items()}

"""The part of a step that is planned, and the step that a plan makes of it.

A recorded step that accumulates gradients holds two micro-batches (:mod:`fxmem.training.step`): the
first makes the gradients, and only the last is traced. All micro-batches run the same forward, so a
plan applies to each. In the last one every gradient exists from the beginning, and whatever the
loop keeps of the micro-batch before is alive: at no point does an earlier one hold more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from fxmem.analysis import Analysis
from fxmem.graph import RESIDENT, MemoryGraph, Phase
from fxmem.memory.allocation import measure_allocation, run_on_device
from fxmem.memory.timeline import build_timeline
from fxmem.planning.inplace.inplace_changes import apply_inplace
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.recomputation import SegmentRange
from fxmem.planning.model.simulate import Simulation, build_graph, simulate_segments
from fxmem.planning.plan import MODULES, Plan, Segment
from fxmem.units import format_bytes


def take_last_micro_batch(analysis: Analysis) -> Analysis:
    """Takes the last micro-batch of an analysed step, and the optimizer's update after it."""
    start = find_last_micro_batch(analysis.graph)
    return analysis if start == 0 else replace(analysis, graph=_cut_graph(analysis.graph, start))


def find_last_micro_batch(graph: MemoryGraph) -> int:
    """Finds the operation that begins the last micro-batch; 0 where there is but one."""
    starts = (
        operation.index
        for before, operation in pairwise(graph.operations)
        if before.phase is Phase.BACKWARD and operation.phase is Phase.FORWARD
    )
    return max(starts, default=0)


def repeat_flops(graph: MemoryGraph, times: int) -> MemoryGraph:
    """Gives each operation of a micro-batch the FLOPs of that operation in all of them."""
    operations = (
        operation
        if operation.phase is Phase.OPTIMIZER
        else replace(operation, flops=operation.flops * times)
        for operation in graph.operations
    )
    return graph if times == 1 else replace(graph, operations=tuple(operations))


def _cut_graph(graph: MemoryGraph, start: int) -> MemoryGraph:
    """Removes the operations before ``start``, except ``step.begin``.

    Storages keep their indices: what is alive at ``start`` becomes resident, and what is freed
    before takes no bytes. Their allocations and frees become part of the warmup.
    """

    def move(operation: int | None) -> int | None:
        return None if operation is None else max(operation - start + 1, 0)

    gone = {s.index for s in graph.storages if s.died is not None and s.died < start}
    storages = tuple(
        replace(
            storage,
            nbytes=0 if storage.index in gone else storage.nbytes,
            born=RESIDENT if storage.born < start else storage.born - start + 1,
            died=move(storage.died),
            cast_until=move(storage.cast_until),
        )
        for storage in graph.storages
    )
    # Storages that are gone, then workspaces, have negative names that are new to the warmup.
    first = 1 + max((~storage for storage, _ in graph.warmup if storage is not None), default=0)
    names = {index: ~(first + at) for at, index in enumerate(sorted(gone))}
    streams = dict(graph.warmup_streams)
    streams.update((names[i], graph.storages[i].stream) for i in gone if graph.storages[i].stream)
    blocks: dict[tuple[int, int], int] = {}

    def name(storage: int | None) -> int | None:
        return storage if storage is None else names.get(storage, storage)

    warmup = [(name(storage), nbytes) for storage, nbytes in graph.warmup]
    for event in build_timeline(graph).events:
        if event.step >= start:
            break
        storage = name(event.storage)
        if storage is None:
            key = event.block, event.stream
            storage = blocks.setdefault(key, ~(first + len(names) + len(blocks)))
            if event.stream:
                streams[storage] = event.stream
        warmup.append((storage, event.delta_bytes))
    kept = graph.operations[start:]
    return replace(
        graph,
        storages=storages,
        operations=(
            graph.operations[0],
            *(replace(operation, index=at) for at, operation in enumerate(kept, 1)),
        ),
        saves=tuple(
            replace(
                save,
                position=save.position - start + 1,
                unpacked=move(save.unpacked),
                released=move(save.released),
                returned=move(save.returned),
            )
            for save in graph.saves
        ),
        warmup=tuple(warmup) if graph.warmup else (),
        warmup_streams=tuple(streams.items()),
        let_go=tuple(map(move, graph.let_go)),
        first_operations=(),
    )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with a plan."""

    analysis: Analysis  # of the rewritten step
    # for each of its operations, the operation of the step without the plan that it is, and
    # whether it is recomputed
    order: tuple[tuple[int, bool], ...]


def simulate_plan(analysis: Analysis, plan: Plan) -> Simulation:
    """Simulates the step of the rewritten graph: segments, operations in place, all values deleted.

    With style ``"modules"`` the user's own code runs on, and only the segments are new. Of a step
    of several micro-batches only the last is simulated.
    """
    graph = take_last_micro_batch(analysis).graph
    changed = apply_inplace(graph, plan.applied_inplace)
    index = build_index(changed, keeps_frames=plan.style == MODULES)
    return simulate_segments(index, locate_segments(index, plan.segments))


def locate_segments(index: StepIndex, segments: Iterable[Segment]) -> tuple[SegmentRange, ...]:
    """Locates a plan's segments among the nodes of the step that the plan was made for."""
    positions = {n.name: n.index for n in index.graph.nodes if n.phase is Phase.FORWARD}

    def locate(segment: Segment) -> SegmentRange:
        children = tuple(map(locate, segment.children))
        return SegmentRange(positions[segment.first], positions[segment.last] + 1, children)

    return tuple(map(locate, segments))


def measure_plan(analysis: Analysis, plan: Plan) -> tuple[int, int]:
    """Measures the bytes that a step with a plan allocates at the peak, and reserves for that."""
    return measure_graph(analysis, build_graph(simulate_plan(analysis, plan)))


def measure_graph(analysis: Analysis, graph: MemoryGraph) -> tuple[int, int]:
    """Measures the allocated and reserved bytes of a graph made from an analysed step's."""
    if analysis.settings is None:
        peak_bytes = max(build_timeline(graph).profile())
        return peak_bytes, peak_bytes
    return measure_allocation(graph, analysis.settings)


def trace_plan(analysis: Analysis, plan: Plan) -> PlannedStep | None:
    """Traces the step that a plan makes; None where its peak is not what the plan says."""
    if plan.peak_bytes == analysis.peak_bytes and not plan.segments:
        order = tuple((operation.index, False) for operation in analysis.graph.operations)
        return PlannedStep(analysis, order)
    simulation = simulate_plan(analysis, plan)
    planned = replace(analysis, graph=build_graph(simulation))
    is_as_said = planned.peak_bytes == plan.peak_bytes
    before = max(find_last_micro_batch(analysis.graph) - 1, 0)  # operations that it leaves out
    order = tuple((index + before if index else 0, again) for index, again in simulation.order)
    return PlannedStep(planned, order) if is_as_said else None


def find_shortage(analysis: Analysis, plan: Plan | None, memory_bytes: int, kept_bytes: int) -> str:
    """Finds why a step does not fit a memory, in the allocator's words; empty where it fits.

    The caching allocator is simulated in the device's memory, of which some is kept for CUDA's
    context and as a margin. On the CPU, which has no such allocator, the peak has to fit.
    """
    graph = analysis.graph
    if plan is not None and (plan.segments or plan.inplace or plan.dels):
        graph = build_graph(simulate_plan(analysis, plan))
    if analysis.settings is None:
        over = measure_graph(analysis, graph)[0] - (memory_bytes - kept_bytes)
        return f"the peak is {format_bytes(over)} over" if over > 0 else ""
    run = run_on_device(graph, analysis.settings, memory_bytes, kept_bytes)
    return "" if run.exhaustion is None else run.exhaustion.cause

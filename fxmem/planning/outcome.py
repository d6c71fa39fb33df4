"""The step that a plan makes of an analysed one: what :func:`fxmem.apply` returns runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph, Phase
from fxmem.memory.allocation import measure_allocation, run_on_device
from fxmem.memory.timeline import build_timeline
from fxmem.planning.inplace.inplace_changes import apply_inplace
from fxmem.planning.last_micro_batch import find_last_micro_batch, take_last_micro_batch
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.segment_ranges import SegmentRange
from fxmem.planning.model.simulate import Simulation, build_graph, simulate_segments
from fxmem.planning.plan import MODULES, Plan, Segment
from fxmem.units import format_bytes


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


def find_shortage(
    analysis: Analysis,
    plan: Plan | None,
    memory_bytes: int,
    context_bytes: int,
    margin_bytes: int = 0,
) -> str:
    """Finds why a step does not fit a memory, in the allocator's words; empty where it fits.

    The caching allocator is simulated in the memory, of which CUDA's context and a margin take
    their parts. On the CPU, which has no such allocator, the peak has to fit.

    Args:
        analysis: Of the step.
        plan: A plan for the step; None for the step as it is.
        memory_bytes: All memory of the device.
        context_bytes: The share of CUDA's context.
        margin_bytes: Memory to be left free besides.
    """
    graph = analysis.graph
    if plan is not None and (plan.segments or plan.inplace or plan.dels):
        graph = build_graph(simulate_plan(analysis, plan))
    if analysis.settings is None:
        over = measure_graph(analysis, graph)[0] - (memory_bytes - margin_bytes)
        return f"the peak is {format_bytes(over)} over" if over > 0 else ""
    kept_bytes = context_bytes + margin_bytes
    run = run_on_device(graph, analysis.settings, memory_bytes, kept_bytes)
    return "" if run.exhaustion is None else run.exhaustion.cause

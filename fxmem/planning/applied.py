"""The step that a plan makes of an analysed one: what :func:`fxmem.apply` returns runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph, Phase
from fxmem.memory.allocation import measure_allocation
from fxmem.memory.timeline import build_timeline
from fxmem.planning.inplace.overwriting import apply_inplace
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.model.simulate import Simulation, build_graph, simulate_segments
from fxmem.planning.plan import GRAPH, MODULES, InplaceChange, Plan, Segment


def apply_plan(analysis: Analysis, plan: Plan) -> MemoryGraph:
    """The step of the rewritten graph: segments, what is in place, and no value kept after use.

    With style ``"modules"`` the user's own code runs on, and only the segments are new.

    Args:
        analysis: That the plan was made from.
        plan: It, or one with some of its segments and changes.
    """
    return build_graph(simulate_plan(analysis, plan))


def simulate_plan(analysis: Analysis, plan: Plan) -> Simulation:
    """Likewise, before it is a memory graph: it knows what runs again.

    Args:
        analysis: That the plan was made from.
        plan: It, or one with some of its segments and changes.
    """
    inplace = plan.inplace if plan.style == GRAPH else ()
    recorded = gather_changed(analysis, inplace, plan.style)
    return simulate_segments(recorded, locate_segments(recorded, plan.segments))


def measure_plan(analysis: Analysis, plan: Plan) -> tuple[int, int]:
    """The bytes that a step with a plan has allocated at most, and those that are reserved then.

    Args:
        analysis: That the plan was made from.
        plan: It, or one with some of its segments and changes.
    """
    return measure_graph(analysis, apply_plan(analysis, plan))


def measure_graph(analysis: Analysis, graph: MemoryGraph) -> tuple[int, int]:
    """Likewise of a step that something made of an analysed one.

    Args:
        analysis: Of the step as it was.
        graph: What it was changed to.
    """
    if analysis.settings is None:
        peak = max(build_timeline(graph).profile())
        return peak, peak
    return measure_allocation(graph, analysis.settings)


def gather_changed(
    analysis: Analysis,
    changes: Iterable[InplaceChange],
    style: str = GRAPH,
) -> StepIndex:
    """What plans ask of a step with operations in place.

    Args:
        analysis: Of the step.
        changes: The operations.
        style: How plans are applied.
    """
    changed = apply_inplace(analysis.graph, changes)
    return build_index(
        changed,
        keeps_frames=style == MODULES,
    )


def locate_segments(recorded: StepIndex, segments: Iterable[Segment]) -> tuple[SegmentRange, ...]:
    """The regions that a plan's segments are.

    Args:
        recorded: The step that the plan was made for.
        segments: Those of the plan.
    """
    nodes = recorded.graph.nodes
    positions = {node.name: node.index for node in nodes if node.phase is Phase.FORWARD}
    return _place(segments, positions)


def _place(segments: Iterable[Segment], positions: Mapping[str, int]) -> tuple[SegmentRange, ...]:
    return tuple(
        SegmentRange(
            positions[segment.first],
            positions[segment.last] + 1,
            _place(segment.children, positions),
        )
        for segment in segments
    )

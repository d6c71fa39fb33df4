"""What plans make of a step, beyond their numbers: where the peak then lies, what fits a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fxmem.allocation import Exhaustion, find_exhaustion
from fxmem.analysis import Analysis
from fxmem.devices import CONTEXT_BYTES
from fxmem.errors import InfeasibleError, UsageError
from fxmem.graph import RESIDENT, MemoryGraph, Phase
from fxmem.liveness import Peak, build_profile
from fxmem.planning.facts import gather_facts
from fxmem.planning.plan import Plan, Segment
from fxmem.planning.regions import Region
from fxmem.planning.simulation import build_graph, simulate_regions
from fxmem.timeline import Action, build_timeline


def find_planned_peak(analysis: Analysis, plan: Plan) -> Peak | None:
    """Where a step has its peak with a plan.

    Args:
        analysis: That the plan was made from.
        plan: What is computed again.

    Returns:
        The peak; None where the segments alone do not make it what the plan says.
    """
    graph = _apply_segments(analysis, analysis.allocated_graph, plan)
    peak = build_profile(graph, build_timeline(graph)).peak
    return peak if peak.nbytes == plan.peak_bytes else None


def choose_fitting(analysis: Analysis, plans: Iterable[Plan]) -> Plan:
    """The first plan whose step fits the GPU that is meant.

    The caching allocator is simulated on the GPU's memory, of which the CUDA context takes its
    largest share, as :attr:`fxmem.Analysis.exhaustion` has it for the step without a plan.

    Args:
        analysis: With a GPU.
        plans: Made from it, cheapest first.

    Raises:
        InfeasibleError: None of them fits.
        UsageError: No GPU is meant.
    """
    if analysis.gpu is None or analysis.settings is None:
        raise UsageError("no GPU is named that the step could fit", hint="gpu='rtx4090'")
    exhaustion: Exhaustion | None = None
    for plan in plans:
        graph = _apply_segments(analysis, analysis.graph, plan)
        exhaustion = find_exhaustion(
            replace(graph, warmup=_repeat_step(graph)),
            analysis.settings,
            analysis.gpu.capacity_bytes,
            max(CONTEXT_BYTES),
        )
        if exhaustion is None:
            return plan
    cause = "" if exhaustion is None else f"; with the leanest, {exhaustion.cause}"
    raise InfeasibleError(f"no plan was found whose step fits {analysis.gpu.name}{cause}")


def _apply_segments(analysis: Analysis, graph: MemoryGraph, plan: Plan) -> MemoryGraph:
    positions = {node.name: node.index for node in graph.nodes if node.phase is Phase.FORWARD}
    facts = gather_facts(graph, counts_host=analysis.setup.device == "cpu")
    return build_graph(simulate_regions(facts, _place_segments(plan.segments, positions)))


def _repeat_step(graph: MemoryGraph) -> tuple[tuple[int | None, int], ...]:
    """What led to a step that comes after one like it: that one, whose blocks are cached."""
    residents = [s for s in graph.storages if s.born == RESIDENT]
    return (
        *((storage.index, storage.nbytes) for storage in residents),
        *_iterate_gone(graph, {storage.index for storage in residents}),
    )


def _iterate_gone(graph: MemoryGraph, residents: set[int]) -> Iterator[tuple[int | None, int]]:
    """Allocations and frees of a step that is over; negative numbers, for nothing of it is left."""
    held: dict[int, int] = {}
    for event in build_timeline(graph).events:
        nbytes = event.nbytes if event.action is Action.ALLOC else -event.nbytes
        if event.storage is None:
            yield None, nbytes
        elif event.storage not in residents:
            held[event.storage] = held.get(event.storage, 0) + nbytes
            yield -event.storage - 1, nbytes
    yield from ((-storage - 1, -nbytes) for storage, nbytes in held.items() if nbytes)


def _place_segments(
    segments: Iterable[Segment], positions: Mapping[str, int]
) -> tuple[Region, ...]:
    return tuple(
        Region(
            positions[segment.first],
            positions[segment.last] + 1,
            _place_segments(segment.children, positions),
        )
        for segment in segments
    )

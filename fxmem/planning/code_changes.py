"""What the user's own code could do: operations in place, and variables let go of."""

from __future__ import annotations

from fxmem.allocation import measure_allocation
from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph
from fxmem.planning.deletion import apply_deletions, find_deletions
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.facts import gather_facts
from fxmem.planning.inplace import apply_inplace, find_inplace
from fxmem.planning.plan import DelPoint, InplaceChange, Plan
from fxmem.timeline import build_timeline


def find_changes(analysis: Analysis) -> tuple[tuple[InplaceChange, ...], tuple[DelPoint, ...]]:
    """The changes that lower the peak of the step as the code is, each by itself.

    Args:
        analysis: Of the step.
    """
    facts = gather_facts(analysis.graph)
    inplace = (change for change in find_inplace(facts) if change.saving_bytes > 0)
    dels = (point for point in find_deletions(facts) if point.saving_bytes > 0)
    return tuple(inplace), tuple(dels)


def plan_changes(analysis: Analysis) -> Plan:
    """The plan of all changes together, with nothing computed again: for inference.

    Args:
        analysis: Of the step.
    """
    facts = gather_facts(analysis.graph)
    inplace, dels = find_inplace(facts), find_deletions(facts)
    changed = apply_deletions(analysis.graph, dels)
    changed = apply_inplace(changed, inplace)
    peak_bytes, reserved_bytes = _measure(analysis, changed)
    return Plan(
        fingerprint=fingerprint_graph(analysis.graph),
        baseline_peak_bytes=analysis.peak_bytes,
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        inplace=inplace,
        dels=dels,
    )


def _measure(analysis: Analysis, graph: MemoryGraph) -> tuple[int, int]:
    if analysis.settings is None:
        peak = max(build_timeline(graph).profile())
        return peak, peak
    return measure_allocation(graph, analysis.settings)

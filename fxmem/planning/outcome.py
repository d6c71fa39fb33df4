"""What plans make of a step, beyond their numbers: where the peak then lies, what fits a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from fxmem.allocation import allocate_graph, find_exhaustion
from fxmem.analysis import Analysis
from fxmem.devices import CONTEXT_BYTES
from fxmem.errors import InfeasibleError, UsageError
from fxmem.liveness import Peak, build_profile
from fxmem.planning.applied import apply_plan
from fxmem.planning.plan import Plan
from fxmem.timeline import build_timeline


def find_planned_peak(analysis: Analysis, plan: Plan) -> Peak | None:
    """Where a step has its peak with a plan.

    Args:
        analysis: That the plan was made from.
        plan: It.

    Returns:
        The peak; None where the rewritten step does not make it what the plan says.
    """
    if plan.peak_bytes == analysis.peak_bytes and not plan.segments:
        return analysis.peak
    graph = apply_plan(analysis, plan)
    if analysis.settings is not None:
        graph = allocate_graph(graph, analysis.settings).graph
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
    exhaustion = analysis.exhaustion
    for plan in plans:
        if plan.segments or plan.inplace:
            exhaustion = find_exhaustion(
                apply_plan(analysis, plan),
                analysis.settings,
                analysis.gpu.capacity_bytes,
                max(CONTEXT_BYTES),
            )
        if exhaustion is None:
            return plan
    cause = "" if exhaustion is None else f"; with the leanest, {exhaustion.cause}"
    raise InfeasibleError(f"no plan was found whose step fits {analysis.gpu.name}{cause}")

"""What plans make of a step, beyond their numbers: where the peak then lies, what fits a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxmem.analysis import Analysis
from fxmem.errors import InfeasibleError, UsageError
from fxmem.gpus import CONTEXT_BYTES
from fxmem.memory.allocation import run_on_device
from fxmem.memory.liveness import Peak
from fxmem.planning.applied import apply_plan, simulate_plan
from fxmem.planning.model.simulate import build_graph
from fxmem.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with a plan.

    Attributes:
        analysis: Of the rewritten step.
        order: For each of its operations, which one of the step without the plan it is, and
            whether it runs because it is computed again.
    """

    analysis: Analysis
    order: tuple[tuple[int, bool], ...]


def trace_plan(analysis: Analysis, plan: Plan) -> PlannedStep | None:
    """The step that a plan makes of an analysed one, and which operations are computed again.

    Args:
        analysis: That the plan was made from.
        plan: It.

    Returns:
        The step; None where its peak is not what the plan says.
    """
    if plan.peak_bytes == analysis.peak_bytes and not plan.segments:
        order = tuple((operation.index, False) for operation in analysis.graph.operations)
        return PlannedStep(analysis, order)
    simulation = simulate_plan(analysis, plan)
    planned = replace(analysis, graph=build_graph(simulation))
    if planned.peak_bytes != plan.peak_bytes:
        return None
    return PlannedStep(planned, simulation.order)


def find_planned_step(analysis: Analysis, plan: Plan) -> Analysis | None:
    """A step as it is with a plan.

    Args:
        analysis: That the plan was made from.
        plan: It.

    Returns:
        The analysis of the rewritten step; None where its peak is not what the plan says.
    """
    step = trace_plan(analysis, plan)
    return None if step is None else step.analysis


def find_planned_peak(analysis: Analysis, plan: Plan) -> Peak | None:
    """Where a step has its peak with a plan.

    Args:
        analysis: That the plan was made from.
        plan: It.

    Returns:
        The peak; None where the rewritten step does not make it what the plan says.
    """
    planned = find_planned_step(analysis, plan)
    return None if planned is None else planned.peak


def choose_fitting(analysis: Analysis, plans: Iterable[Plan]) -> Plan:
    """The first plan whose step fits the GPU that is meant.

    The caching allocator is simulated on the GPU's memory, of which the CUDA context takes its
    largest share, as :attr:`fxmem.Analysis.exhaustion` has it for the step without a plan.

    Args:
        analysis: With a GPU.
        plans: Activation from it, cheapest first.

    Raises:
        InfeasibleError: None of them fits.
        UsageError: No GPU is meant.
    """
    if analysis.gpu is None or analysis.settings is None:
        raise UsageError("no GPU is named that the step could fit", hint="gpu='rtx4090'")
    exhaustion = analysis.exhaustion
    for plan in plans:
        if plan.segments or plan.inplace or plan.dels:
            exhaustion = run_on_device(
                apply_plan(analysis, plan),
                analysis.settings,
                analysis.gpu.capacity_bytes,
                max(CONTEXT_BYTES),
            ).exhaustion
        if exhaustion is None:
            return plan
    cause = "" if exhaustion is None else f"; with the leanest, {exhaustion.cause}"
    raise InfeasibleError(f"no plan was found whose step fits {analysis.gpu.name}{cause}")

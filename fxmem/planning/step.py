"""An analysed step, prepared for planning: what its operations cost, and what plans may not do."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.memory.allocator import AllocatorSettings
from fxmem.planning.describe import describe_limits, describe_modules, fingerprint_graph
from fxmem.planning.model.costs import find_roofline, price_operations
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import Limits, find_limits
from fxmem.planning.model.modules import ModuleChoice, list_calls, list_modules
from fxmem.planning.plan import GRAPH, MODULES, STYLES, Plan

_TIE = 1e-3
"""Where FLOPs are what counts, how much time does besides: to tell what has none apart."""


@dataclass(frozen=True, slots=True)
class PlanningStep:
    """An analysed step, prepared for planning.

    Attributes:
        index: What plans ask of it.
        limits: What may not be computed again.
        costs_s: Seconds of each operation, by its index.
        step_s: Seconds of the whole step, by the roofline.
        step_flops: FLOPs of the whole step.
        requested: ``index``, with sizes as they are asked for.
        settings: The allocator's; None where none caches.
        modules: The modules that can be recomputed as a whole.
        base: The plan that changes nothing, with all that is the same in the others.
    """

    index: StepIndex
    limits: Limits
    costs_s: tuple[float, ...]
    step_s: float
    step_flops: int
    requested: StepIndex
    settings: AllocatorSettings | None
    modules: tuple[ModuleChoice, ...]
    base: Plan

    def list_costs(self, by_flops: bool) -> tuple[float, ...]:
        """What the search minimises: shares of the step's time, or of its FLOPs."""
        step_s, step_flops = self.step_s or 1.0, self.step_flops
        if not by_flops or not step_flops:
            return tuple(cost / step_s for cost in self.costs_s)
        return tuple(
            operation.flops / step_flops + _TIE * cost / step_s
            for operation, cost in zip(self.index.graph.operations, self.costs_s, strict=True)
        )


def prepare_step(analysis: Analysis, style: str | None = None) -> PlanningStep:
    """Prepares an analysed step.

    Args:
        analysis: Of the step.
        style: As for :func:`plan`.

    Raises:
        UsageError: This is no analysis; its step is none of training, adds up gradients of
            several micro-batches, or retains its graph; or there is no such style for it.
    """
    check_analysis(analysis)
    style = _choose_style(analysis, style)
    if analysis.setup.mode != "train":
        raise UsageError(
            "inference saves nothing that could be computed again", hint="mode='train'"
        )
    phases = [operation.phase for operation in analysis.graph.operations]
    backward = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
    if Phase.FORWARD in phases[backward:]:
        raise UsageError("plans are made for one micro-batch", hint="analyze it without accumulate")
    if analysis.setup.loop.retain_graph:
        raise UsageError(
            "retain_graph=True keeps what a plan would compute again",
            hint="analyze it with another loop",
        )
    index, requested = (
        build_index(graph, keeps_frames=style == MODULES)
        for graph in (analysis.allocated_graph, analysis.graph)
    )
    limits = find_limits(index)
    if style == MODULES:
        modules, obstacles = list_modules(index, limits)
        told = describe_modules(index, obstacles)
    else:
        modules = list_calls(index, limits)
        told = describe_limits(index, limits)
    costs_s = price_operations(analysis.graph, find_roofline(analysis.setup.device, analysis.gpu))
    return PlanningStep(
        index=index,
        limits=limits,
        costs_s=costs_s,
        step_s=sum(costs_s),
        step_flops=sum(operation.flops for operation in index.graph.operations),
        requested=requested,
        settings=analysis.settings,
        modules=modules,
        base=Plan(
            fingerprint=fingerprint_graph(index.graph),
            baseline_peak_bytes=analysis.peak_bytes,
            peak_bytes=analysis.peak_bytes,
            limits=told,
            style=style,
            size_hint=analysis.setup.size_hint,
            fx_graph=analysis.fx_graph if style == GRAPH else None,
        ),
    )


def check_analysis(analysis: object) -> None:
    """Checks that plans are asked of an analysis.

    Raises:
        UsageError: It is something else, such as a model.
    """
    if not isinstance(analysis, Analysis):
        raise UsageError(
            f"plans are made of an analysis, not of an object of type {type(analysis).__name__}",
            hint="fxmem.analyze(model, ...) makes one",
        )


def _choose_style(analysis: Analysis, style: str | None) -> str:
    if style is None:
        return GRAPH if analysis.frontend == "fx" else MODULES
    if style not in STYLES:
        raise UsageError(f"unknown style {style!r}", hint=" or ".join(STYLES))
    if style == GRAPH and analysis.frontend != "fx":
        raise UsageError(
            f"this model's graph cannot be rewritten: {analysis.setup.frontend_reason}",
            hint="style='modules'",
        )
    return style

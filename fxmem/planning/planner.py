"""Plans for an analysed step: cheapest under a budget, leanest for a time, all trade-offs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxmem.allocation import measure_allocation
from fxmem.allocator import AllocatorSettings
from fxmem.analysis import Analysis
from fxmem.errors import InfeasibleError, UsageError
from fxmem.graph import Phase
from fxmem.liveness import build_profile
from fxmem.planning.bound import bound_cost
from fxmem.planning.code_changes import add_changes, plan_changes
from fxmem.planning.costs import find_roofline, price_operations
from fxmem.planning.describe import (
    describe_limits,
    describe_modules,
    describe_segments,
    fingerprint_graph,
)
from fxmem.planning.facts import StepFacts, gather_facts
from fxmem.planning.front import Candidate
from fxmem.planning.limits import Limits, find_limits
from fxmem.planning.module_search import find_module_front
from fxmem.planning.modules import ModuleChoice, list_modules, name_spans
from fxmem.planning.plan import GRAPH, MODULES, STYLES, Plan
from fxmem.planning.search import find_front
from fxmem.planning.simulation import build_graph, simulate_regions
from fxmem.timeline import build_timeline
from fxmem.units import format_bytes, parse_bytes

TIME_LIMIT_S = 10.0
_SEARCH_SHARE = 0.65
"""Of the time there is; the rest is for replaying the allocator and for the bound."""
_SLACK = 1.02
"""How far above a budget the search's sum may be and the allocator's blocks fit all the same."""
_TIE = 1e-3
"""Where FLOPs are what counts, how much time does besides: to tell what has none apart."""


@dataclass(frozen=True, slots=True)
class PlanningStep:
    """An analysed step, prepared for planning.

    Attributes:
        facts: What plans ask of it.
        baseline_peak_bytes: Its peak as the user runs it.
        costs_s: Seconds of each operation, by its index.
        fx_graph: What a plan is applied to.
        requested: ``facts``, with sizes as they are asked for.
        settings: The allocator's; None where none caches.
        style: How plans are applied.
        modules: Those that may be computed again, for that style.
        obstacles: Why others may not, by name.
        size_hint: What was assumed of sizes that depend on data.
    """

    facts: StepFacts
    baseline_peak_bytes: int
    costs_s: tuple[float, ...]
    fx_graph: Any
    requested: StepFacts
    settings: AllocatorSettings | None
    style: str = GRAPH
    modules: tuple[ModuleChoice, ...] = ()
    obstacles: Mapping[str, str] = field(default_factory=dict)
    size_hint: int | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, by the roofline."""
        return sum(self.costs_s)

    @property
    def step_flops(self) -> int:
        """FLOPs of the whole step."""
        return sum(operation.flops for operation in self.facts.graph.operations)

    def list_costs(self, by_flops: bool) -> tuple[float, ...]:
        """What the search minimises: shares of the step's time, or of its FLOPs."""
        step_s, step_flops = self.step_s or 1.0, self.step_flops
        if not by_flops or not step_flops:
            return tuple(cost / step_s for cost in self.costs_s)
        return tuple(
            operation.flops / step_flops + _TIE * cost / step_s
            for operation, cost in zip(self.facts.graph.operations, self.costs_s, strict=True)
        )


def prepare_step(analysis: Analysis, style: str | None = None) -> PlanningStep:
    """Prepares an analysed step.

    Args:
        analysis: Of the step.
        style: As for :func:`plan`.

    Raises:
        UsageError: The step is none of training, or adds up gradients of several micro-batches;
            or there is no such style for it.
    """
    style = _choose_style(analysis, style)
    if analysis.setup.mode != "train":
        raise UsageError(
            "inference saves nothing that could be computed again", hint="mode='train'"
        )
    phases = [operation.phase for operation in analysis.graph.operations]
    backward = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
    if Phase.FORWARD in phases[backward:]:
        raise UsageError("plans are made for one micro-batch", hint="analyze it without accumulate")
    on_cpu = analysis.setup.device == "cpu"
    facts, requested = (
        gather_facts(graph, counts_host=on_cpu, keeps_frames=style == MODULES)
        for graph in (analysis.allocated_graph, analysis.graph)
    )
    roofline = find_roofline(analysis.setup.device, analysis.gpu)
    modules, obstacles = list_modules(facts, find_limits(facts)) if style == MODULES else ((), {})
    return PlanningStep(
        facts=facts,
        baseline_peak_bytes=analysis.peak_bytes,
        costs_s=price_operations(analysis.graph, roofline),
        fx_graph=analysis.fx_graph if style == GRAPH else None,
        requested=requested,
        settings=analysis.settings,
        style=style,
        modules=modules,
        obstacles=obstacles,
        size_hint=analysis.setup.size_hint,
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


def pareto(
    analysis: Analysis,
    *,
    by_flops: bool = False,
    points: int = 20,
    time_limit_s: float = TIME_LIMIT_S,
    style: str | None = None,
) -> tuple[Plan, ...]:
    """The trade-offs of a step, cheapest first; the first computes nothing again.

    Args:
        analysis: Of a training step.
        by_flops: Whether cost is counted in FLOPs; else in time.
        points: How many there are at most, spread over the peaks from most to least.
        time_limit_s: About how long it may take.
        style: ``"graph"`` for any consecutive operations, by rewriting the model's graph;
            ``"modules"`` for all of a module's calls, by wrapping the module, which leaves the
            model's code as it is. None for the first where the ``fx`` frontend served, else the
            other.

    Returns:
        Plans; what each of their segments saves is told by :func:`plan` only.

    Raises:
        UsageError: The step is none of training, or adds up several micro-batches; or there is
            no such style for it.
    """
    step = prepare_step(analysis, style)
    limits = find_limits(step.facts)
    front = _search(step, limits, by_flops, time_limit_s)
    chosen = _spread_points(front, points)
    return tuple(_build_plan(step, limits, candidate, in_full=False) for candidate in chosen)


def plan(
    analysis: Analysis,
    *,
    budget: str | int | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    style: str | None = None,
) -> Plan:
    """The plan that a limit asks for.

    In training it says what to compute again, and what can run in place beside that. In inference
    nothing is computed again: the plan is what runs in place, what is let go of and what runs
    earlier, and no limit is needed.

    Args:
        analysis: Of the step.
        budget: What the step may take, in bytes or as ``"8GiB"``: the cheapest plan within it.
        max_overhead: How much time a plan may add, as a share of the step's: the leanest such.
        max_overhead_flops: Likewise in FLOPs.
        time_limit_s: About how long it may take.
        style: ``"graph"`` for any consecutive operations, by rewriting the model's graph;
            ``"modules"`` for all of a module's calls, by wrapping the module, which leaves the
            model's code as it is. None for the first where the ``fx`` frontend served, else the
            other.

    Raises:
        InfeasibleError: No plan that was found keeps the budget.
        UsageError: Not exactly one limit is given, or it is none; or the step adds up several
            micro-batches, or there is no such style for it.
    """
    budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    if analysis.setup.mode != "train":
        changes = plan_changes(analysis, _SEARCH_SHARE * time_limit_s)
        if budget_bytes is not None and changes.peak_bytes > budget_bytes:
            raise InfeasibleError(
                f"no plan within {format_bytes(budget_bytes)} was found; with all changes the step"
                f" takes {format_bytes(changes.peak_bytes)}"
            )
        return changes
    limits = (budget, max_overhead, max_overhead_flops)
    if sum(limit is not None for limit in limits) != 1:
        raise UsageError(
            "a plan needs one limit",
            hint="budget='8GiB', max_overhead=0.1 or max_overhead_flops=0.1",
        )
    for share in (max_overhead, max_overhead_flops):
        if share is not None and not (isinstance(share, int | float) and share >= 0):
            raise UsageError(f"an overhead cannot be {share!r}", hint="0.1 for a tenth more")
    step = prepare_step(analysis, style)
    found = _plan_segments(step, budget_bytes, max_overhead, max_overhead_flops, time_limit_s)
    return add_changes(analysis, found)


def _plan_segments(
    step: PlanningStep,
    budget_bytes: int | None,
    max_overhead: float | None,
    max_overhead_flops: float | None,
    time_limit_s: float,
) -> Plan:
    limits = find_limits(step.facts)
    most = max_overhead if max_overhead_flops is None else max_overhead_flops
    front = _search(step, limits, max_overhead_flops is not None, time_limit_s, budget_bytes, most)
    if budget_bytes is not None:
        # The search adds up blocks as the plain step has them; another order may give others.
        nearly = [c for c in front if c.peak_bytes <= budget_bytes * _SLACK]
        for candidate in nearly:
            if _measure_peak(step, candidate)[0] <= budget_bytes:
                return _build_plan(step, limits, candidate)
        bound_s = bound_cost(step.facts, limits, step.costs_s, int(budget_bytes * _SLACK))
        found = "exists" if math.isinf(bound_s) else "was found"
        leanest = _explain_leanest(step, front[-1])
        raise InfeasibleError(f"no plan within {format_bytes(budget_bytes)} {found}; {leanest}")
    plans = (_measure_overhead(step, candidate) for candidate in front)
    if max_overhead is not None:
        allowed = [c for c, (time, _) in zip(front, plans, strict=True) if time <= max_overhead]
    else:
        most = max_overhead_flops or 0.0
        allowed = [c for c, (_, flops) in zip(front, plans, strict=True) if flops <= most]
    return _build_plan(step, limits, allowed[-1])


def _search(
    step: PlanningStep,
    limits: Limits,
    by_flops: bool,
    time_limit_s: float,
    goal_bytes: int | None = None,
    goal_cost: float | None = None,
) -> Sequence[Candidate]:
    if step.style == MODULES:
        return find_module_front(
            step.facts,
            step.modules,
            step.list_costs(by_flops),
            _SEARCH_SHARE * time_limit_s,
            goal_bytes,
            goal_cost,
        )
    return find_front(
        step.facts,
        limits,
        step.list_costs(by_flops),
        _SEARCH_SHARE * time_limit_s,
        goal_bytes,
        goal_cost,
        step.list_costs(not by_flops),
    )


def _measure_overhead(step: PlanningStep, candidate: Candidate) -> tuple[float, float]:
    """Seconds and FLOPs that a candidate adds, over those of the step."""
    again = [*simulate_regions(step.facts, candidate.regions).recomputed]
    flops = sum(step.facts.graph.operations[index].flops for index in again)
    seconds = sum(step.costs_s[index] for index in again)
    return seconds / (step.step_s or 1.0), flops / (step.step_flops or 1)


def _measure_peak(step: PlanningStep, candidate: Candidate) -> tuple[int, int]:
    """What is allocated and reserved at the most, as the allocator makes it."""
    if step.settings is None:
        return candidate.peak_bytes, candidate.peak_bytes
    graph = build_graph(simulate_regions(step.requested, candidate.regions))
    return measure_allocation(graph, step.settings)


def _explain_leanest(step: PlanningStep, leanest: Candidate) -> str:
    graph = build_graph(simulate_regions(step.facts, leanest.regions))
    profile = build_profile(graph, build_timeline(graph))
    held = sorted(profile.breakdown.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{category.value.lower().replace('_', ' ')} {format_bytes(nbytes)}"
        for category, nbytes in held
        if nbytes
    )
    node = profile.peak.node
    at = f" at {node.name}" if node else ""
    where = f" ({profile.peak.source})" if profile.peak.source else ""
    return (
        f"the leanest takes {format_bytes(leanest.peak_bytes)},"
        f" in {profile.peak.phase.value}{at}{where}: {parts}"
    )


def _spread_points(front: Sequence[Candidate], points: int) -> Sequence[Candidate]:
    """Some of a front: the two ends, and peaks between them closer to each other as they fall."""
    if len(front) <= points:
        return front
    most, least = front[0].peak_bytes, front[-1].peak_bytes
    goals = [most * (least / most) ** (at / (points - 1)) for at in range(points)]
    nearest = (min(front, key=lambda c: abs(c.peak_bytes - goal)) for goal in goals)
    return [*dict.fromkeys(nearest)]


def _bound_overhead(step: PlanningStep, limits: Limits, candidate: Candidate) -> float:
    bound_s = bound_cost(step.facts, limits, step.costs_s, candidate.peak_bytes)
    # The plan is one of those that it bounds, but for rounding.
    return min(bound_s / (step.step_s or 1.0), _measure_overhead(step, candidate)[0])


def _build_plan(
    step: PlanningStep, limits: Limits, candidate: Candidate, *, in_full: bool = True
) -> Plan:
    """A candidate as a plan; in full with what each segment saves, and the bound."""
    overhead, overhead_flops = _measure_overhead(step, candidate)
    peak_bytes, reserved_bytes = _measure_peak(step, candidate)
    if not candidate.regions:  # values go no later than in the code as it is
        peak_bytes = min(peak_bytes, step.baseline_peak_bytes)
    if step.style == MODULES:
        names, told = name_spans(step.modules), describe_modules(step.facts, step.obstacles)
    else:
        names, told = None, describe_limits(step.facts, limits)
    return Plan(
        fingerprint=fingerprint_graph(step.facts.graph),
        baseline_peak_bytes=step.baseline_peak_bytes,
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        overhead=overhead,
        overhead_flops=overhead_flops,
        segments=describe_segments(
            step.facts, candidate.regions, step.costs_s, with_savings=in_full, names=names
        ),
        lower_bound_overhead=_bound_overhead(step, limits, candidate) if in_full else None,
        limits=told,
        style=step.style,
        size_hint=step.size_hint,
        fx_graph=step.fx_graph,
    )

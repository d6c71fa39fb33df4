"""Plans for an analysed step: cheapest under a budget, leanest for a time, all trade-offs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxmem.analysis import Analysis
from fxmem.errors import InfeasibleError, UsageError
from fxmem.memory.allocation import measure_allocation
from fxmem.memory.liveness import build_profile
from fxmem.memory.timeline import build_timeline
from fxmem.planning.deletion import apply_deletions, find_deletions
from fxmem.planning.inplace.forms import NODE, find_overwriting
from fxmem.planning.inplace.inplace_changes import apply_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.model.recomputation import nest_spans
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.simulate import build_graph, simulate_segments
from fxmem.planning.outcome import (
    find_shortage,
    locate_segments,
    measure_graph,
    measure_plan,
    take_last_micro_batch,
)
from fxmem.planning.plan import MODULES, Front, Plan, fingerprint_graph
from fxmem.planning.prepared_step import (
    PlanningStep,
    check_analysis,
    describe_segments,
    prepare_step,
)
from fxmem.planning.strategies.bound import bound_cost
from fxmem.planning.strategies.builtin import resolve_strategy
from fxmem.planning.strategies.problem import Candidate, Goal, PlanProblem, Strategy, run_strategy
from fxmem.units import format_bytes, resolve_bytes

_SLACK = 1.02
"""Excess over a budget in the search's sum that the allocator's blocks may still avoid."""

_WORTH = 0.05
"""Share of the peak that a plan has to take off for all of the step's time, or FLOPs, once more.

One percent more time has to save a twentieth of a percent of the peak. Checkpoints of all blocks
save some two percent for it.
"""


def find_front(
    analysis: Analysis, *, by_flops: bool, points: int, style: str | None = None, **search: Any
) -> Front:
    """Lists the trade-offs of a training step: :func:`fxmem.pareto`."""
    step = prepare_step(analysis, style)
    front, _ = _search(step, Goal(by_flops=by_flops), **search)
    front = _leave_out_poor(front)
    if len(front) > points:  # both ends, and peaks between them closer to each other as they fall
        most, least = front[0].peak_bytes, front[-1].peak_bytes
        goals = [most * (least / most) ** (at / (points - 1)) for at in range(points)]
        nearest = (min(front, key=lambda c: abs(c.peak_bytes - goal)) for goal in goals)
        front = [*dict.fromkeys(nearest)]
    return Front(_make_plan(step, candidate, in_full=False) for candidate in front)


def plan_inference(analysis: Analysis, budget: str | float | None) -> Plan:
    """Makes the plan of all changes together, with nothing recomputed: :func:`fxmem.plan`."""
    index = build_index(analysis.graph)
    plan = Plan(
        fingerprint=fingerprint_graph(analysis.graph),
        baseline_peak_bytes=analysis.peak_bytes,
        peak_bytes=analysis.peak_bytes,
        inplace=find_inplace(index),
        dels=find_deletions(index),
        mode=analysis.setup.mode,
        size_hint=analysis.setup.size_hint,
        fx_graph=analysis.fx_graph if analysis.frontend == "fx" else None,
        analysis=analysis,
    )
    if plan.fx_graph is None:
        changed = apply_inplace(apply_deletions(analysis.graph, plan.dels), plan.inplace)
        peak_bytes, reserved_bytes = measure_graph(analysis, changed)
    else:
        # Those that run in place under a plan: no hook may keep what they overwrite.
        found = find_overwriting(plan.fx_graph, plan.inplace)
        runs = {each.node.meta[NODE] for each in found if not each.is_watched}
        plan = replace(plan, inplace=tuple(c for c in plan.inplace if c.node in runs))
        peak_bytes, reserved_bytes = measure_plan(analysis, plan)
    if budget is not None and peak_bytes > resolve_bytes(budget):
        raise InfeasibleError(
            f"no plan within {format_bytes(resolve_bytes(budget))} was found; with all changes the"
            f" step takes {format_bytes(peak_bytes)}"
        )
    return replace(plan, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes)


def find_plan(analysis: Analysis, goal: Goal, *, style: str | None = None, **search: Any) -> Plan:
    """Finds the plan of a training step that keeps a limit: :func:`fxmem.plan`."""
    step = prepare_step(analysis, style)
    front, is_over = _search(step, goal, **search)
    if goal.overhead is None:
        found = _choose_within(step, front, goal, is_over)
    else:
        leanest = next(
            candidate
            for candidate in reversed(_leave_out_poor(front))  # the first adds nothing
            if _measure_overhead(step, candidate)[goal.by_flops] <= goal.overhead
        )
        found = _make_plan(step, leanest)
    return _add_changes(take_last_micro_batch(analysis), found)


def resolve_limit(
    budget: str | float | None, max_overhead: float | None, max_overhead_flops: float | None
) -> Goal:
    """Checks the limit of a plan.

    Raises:
        UsageError: Not exactly one limit is given, or it is not understood.
    """
    limits = (budget, max_overhead, max_overhead_flops)
    if sum(limit is not None for limit in limits) != 1:
        raise UsageError(
            "a plan needs one limit",
            hint="budget='8GiB', max_overhead=0.1 or max_overhead_flops=0.1",
        )
    if budget is not None:
        return Goal(resolve_bytes(budget))
    share = max_overhead if max_overhead_flops is None else max_overhead_flops
    if isinstance(share, bool) or not (isinstance(share, int | float) and share >= 0):
        raise UsageError(f"an overhead cannot be {share!r}", hint="0.1 for a tenth more")
    return Goal(overhead=share, by_flops=max_overhead is None)


def plan_fitting(analysis: Analysis, *, style: str | None = None, **search: Any) -> Plan:
    """Finds the cheapest plan whose step fits the target GPU; at once one for a step that fits.

    The caching allocator is simulated in the GPU's memory, of which the CUDA context takes its
    largest share, as in :attr:`fxmem.Analysis.exhaustion`. Leaner plans fit where cheaper
    ones do, but for a few that fill blocks badly: the first of the front that fits is sought by
    halves, and the search goes on near the memory that is there.

    Raises:
        InfeasibleError: No plan was found whose step fits.
        UsageError: No GPU is named, or there is no such style for the step.
    """
    check_analysis(analysis)
    gpu, context_bytes = analysis.gpu, max(analysis.context_bytes)
    if gpu is None or analysis.settings is None:
        raise UsageError("fitting a GPU needs a GPU", hint="gpu='rtx4090'")
    step = prepare_step(analysis, style)
    if analysis.exhaustion is None:
        return step.base
    room_bytes = gpu.capacity_bytes - context_bytes
    front, _ = _search(step, Goal(room_bytes), **search)

    def make_plan(at: int) -> Plan:
        return _make_plan(step, front[at], in_full=False)

    def find_cause(at: int) -> str:
        return find_shortage(analysis, make_plan(at), gpu.capacity_bytes, context_bytes)

    last = len(front) - 1
    if cause := find_cause(last):
        raise InfeasibleError(
            f"no plan was found whose step fits {gpu.name}; with the leanest, {cause}"
        )
    first = next(at for at, c in enumerate(front) if c.peak_bytes <= room_bytes * _SLACK)
    fits = bisect_left(range(last), True, lo=first, key=lambda at: not find_cause(at))
    return make_plan(fits)


def transfer_plan(analysis: Analysis, plan: Plan) -> Plan | None:
    """Makes a plan's segments a plan for the same model's step with other sizes, where they fit."""
    step = prepare_step(analysis, plan.style)
    named = {node.name for node in step.index.graph.nodes}
    if not named >= {name for each in plan.segments for name in (each.first, each.last)}:
        return None
    candidate = make_problem(step).score_segments(locate_segments(step.index, plan.segments))
    return _add_changes(take_last_micro_batch(analysis), _make_plan(step, candidate))


def plan_modules(analysis: Analysis, choices: Mapping[str, Collection[str]]) -> dict[str, Plan]:
    """Makes plans that recompute modules chosen by name; none where one of those cannot be."""
    step = prepare_step(analysis, MODULES)
    problem = make_problem(step)
    modules = {choice.fqn: choice.spans for choice in step.modules}
    plans = {}
    for name, chosen in choices.items():
        if modules.keys() >= {*chosen}:
            spans = nest_spans(span for fqn in chosen for span in modules[fqn])
            plans[name] = _make_plan(step, problem.score_segments(spans), in_full=False)
    return plans


def make_problem(step: PlanningStep, goal: Goal | None = None) -> PlanProblem:
    """Makes the problem that strategies propose segments for."""
    goal = goal or Goal()
    return PlanProblem(
        step.index,
        step.limits,
        step.list_costs(goal.by_flops),
        step.list_costs(not goal.by_flops),
        step.modules,
        step.base.style == MODULES,
        goal,
    )


def _search(
    step: PlanningStep,
    goal: Goal,
    *,
    strategy: str | Strategy | None = None,
    time_limit_s: float | None = None,
) -> tuple[Sequence[Candidate], bool]:
    """Searches for plans; returns the front, and whether the search came to its end in time."""
    problem = make_problem(step, goal)
    is_over = run_strategy(problem, resolve_strategy(strategy), time_limit_s)
    return problem.price_runs(step.price_run(goal.by_flops)), is_over


def _add_changes(analysis: Analysis, plan: Plan) -> Plan:
    """Adds to a training plan the changes to the user's own code that lower its step's peak.

    They are no part of the plan's peak: :func:`fxmem.apply` makes them in inference alone.
    """
    index = build_index(analysis.graph)
    inplace = tuple(change for change in find_inplace(index) if change.saving_bytes > 0)
    dels = tuple(point for point in find_deletions(index) if point.saving_bytes > 0)
    return replace(plan, inplace=inplace, dels=dels)


def _leave_out_poor(front: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leaves out candidates that save next to nothing for what they add to a cheaper one.

    A plan within a budget is taken from the whole front: there a little may be what it takes.
    """
    kept = [front[0]]
    for candidate in front[1:]:
        saving_bytes = kept[-1].peak_bytes - candidate.peak_bytes
        if saving_bytes >= _WORTH * (candidate.cost - kept[-1].cost) * front[0].peak_bytes:
            kept.append(candidate)
    return kept


def _choose_within(
    step: PlanningStep, front: Sequence[Candidate], goal: Goal, is_over: bool
) -> Plan:
    budget_bytes = goal.budget_bytes or 0
    for candidate in front:
        # The search adds up blocks as the plain step has them; another order may give others.
        if candidate.peak_bytes <= budget_bytes * _SLACK:
            measured = _measure(step, candidate)
            if measured.peak_bytes <= budget_bytes:
                return _describe(step, candidate, measured)
    bound_s = bound_cost(step.index, step.limits, step.costs_s, int(budget_bytes * _SLACK))
    found = "exists" if math.isinf(bound_s) else "was found"
    leanest = front[-1]
    graph = build_graph(simulate_segments(step.index, leanest.segments))
    profile = build_profile(graph, build_timeline(graph))
    held = ", ".join(
        f"{category.value.lower().replace('_', ' ')} {format_bytes(nbytes)}"
        for category, nbytes in sorted(profile.breakdown.items(), key=lambda item: -item[1])
        if nbytes
    )
    peak = profile.peak
    node = f" at {peak.node.name}" if peak.node else ""
    source = f" ({peak.source})" if peak.source else ""
    raise InfeasibleError(
        f"no plan within {format_bytes(budget_bytes)} {found}; the leanest takes"
        f" {format_bytes(leanest.peak_bytes)}, in {peak.phase.value}{node}{source}: {held}",
        hint="a smaller batch, or what `fxmem plan --advice` and fxmem.advise list"
        if is_over or math.isinf(bound_s)
        else "with a longer time limit one may be found",
    )


def _measure_overhead(step: PlanningStep, candidate: Candidate) -> tuple[float, float]:
    """Measures the seconds and FLOPs that a candidate adds, as shares of the step's."""
    seconds, flops = step.price_segments(candidate.segments)
    return seconds / (step.step_s or 1.0), flops / (step.step_flops or 1)


def _measure(step: PlanningStep, candidate: Candidate) -> Plan:
    """Measures a candidate's plan as the allocator makes it; its segments are not described yet."""
    overhead, overhead_flops = _measure_overhead(step, candidate)
    peak_bytes = reserved_bytes = candidate.peak_bytes
    if step.settings is not None:
        graph = build_graph(simulate_segments(step.requested, candidate.segments))
        peak_bytes, reserved_bytes = measure_allocation(graph, step.settings)
    if not candidate.segments:  # values go no later than in the code as it is
        peak_bytes = min(peak_bytes, step.base.peak_bytes)
    return replace(
        step.base,
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        overhead=overhead,
        overhead_flops=overhead_flops,
    )


def _make_plan(step: PlanningStep, candidate: Candidate, *, in_full: bool = True) -> Plan:
    return _describe(step, candidate, _measure(step, candidate), in_full=in_full)


def _describe(
    step: PlanningStep, candidate: Candidate, measured: Plan, *, in_full: bool = True
) -> Plan:
    """Describes a candidate's segments; in full with each one's saving, and the lower bound."""
    bound = scorer = None
    if in_full:
        scorer = Scorer(step.index, step.costs_s)
        bound_s = bound_cost(step.index, step.limits, step.costs_s, candidate.peak_bytes)
        bound_s += step.run_s * (bound_s > 0)  # whatever is computed again, at least once
        # The bound holds for this plan too, but for rounding.
        bound = min(bound_s / (step.step_s or 1.0), measured.overhead)
    names = None
    if step.base.style == MODULES:
        names = {span: module.fqn for module in step.modules for span in module.spans}
    ranges = candidate.segments
    segments = []
    for at, segment in enumerate(describe_segments(step.index, ranges, names)):
        saving_bytes = 0
        if scorer is not None:
            without = scorer.score([*ranges[:at], *ranges[at + 1 :]])
            saving_bytes = without[0] - candidate.peak_bytes
        seconds, flops = step.price_segments([ranges[at]])
        segments.append(
            replace(segment, saving_bytes=saving_bytes, recompute_s=seconds, recompute_flops=flops)
        )
    return replace(measured, segments=tuple(segments), lower_bound_overhead=bound)

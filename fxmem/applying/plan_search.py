"""The search for plans of an analysed step, of one process or of one rank of many.

A rank's peak depends on when wrappers gather, reduce and free; simulated plans cannot know that.
So the modules that a rank recomputes are sought in the same step in one process, where parameters,
gradients and the optimizer, which processes share, take nothing. Each candidate plan is applied to
the model, laid out on the mesh, and recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_again
from fxmem.applying.applying import apply
from fxmem.errors import FxmemError, InfeasibleError, UsageError
from fxmem.graph import Category
from fxmem.parallelism.checkpointing import checkpoint_blocks, find_blocks
from fxmem.parallelism.wrapping import parallelize_model
from fxmem.planning.model.recomputation import iterate_segments
from fxmem.planning.plan import MODULES, CheckpointPrice, Front, Plan
from fxmem.planning.planner import (
    find_front,
    find_plan,
    plan_inference,
    plan_modules,
    resolve_limit,
)
from fxmem.planning.prepared_step import check_analysis, price_change
from fxmem.planning.strategies.problem import Goal, Strategy, prune
from fxmem.training.options import load_choice
from fxmem.units import format_bytes

_MOST_RECORDED = 8  # plans of a front, each of which is recorded
_FINE_POINTS = 32  # of a front that is searched by halves
_EVERY = {1: "every block", 2: "every 2nd block", 4: "every 4th block"}
"""Plans of every so many blocks: torchtitan's ``full``, and its selective by layer."""
_SHARED = (Category.PARAMETER, Category.GRADIENT)


def plan(
    analysis: Analysis,
    *,
    budget: str | float | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    time_limit_s: float | None = None,
    style: str | None = None,
    strategy: str | Strategy | None = None,
) -> Plan:
    """Finds the plan that keeps a limit.

    A plan of a training step says what to recompute in backward. In inference nothing is
    recomputed: the plan says what runs in place and what is freed early, and needs no limit.

    Args:
        analysis: Of the step.
        budget: Most memory of the step, in bytes or as ``"8GiB"``: the cheapest plan within it.
        max_overhead: Most time that a plan may add, as a share of the step's: the plan with the
            lowest peak.
        max_overhead_flops: Most FLOPs that a plan may add, as a share of the step's.
        time_limit_s: Seconds after which the search is cut short. Without it the search ends
            after so many trials, and finds the same plan on any machine.
        style: ``"graph"`` for any consecutive operations, by rewriting the model's graph;
            ``"modules"`` for all of a module's calls, by wrapping the module, which leaves the
            model's code as it is. None for the first where the ``fx`` frontend served, else the
            second.
        strategy: A :class:`fxmem.planning.strategies.problem.Strategy` of your own, a TARGET of
            one, or ``"search"`` (None too), ``"schedules"``, ``"changes"`` or ``"modules"``.

    Raises:
        InfeasibleError: No plan within the budget was found.
        UsageError: Not exactly one limit is given, or it is not understood; or there is no such
            style for the step.

    >>> from torch import nn
    >>> from fxmem import analyze
    >>> net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    >>> found = plan(analyze(net, "4096x8", device="cpu"), budget="6MiB", time_limit_s=1)
    >>> found.baseline_peak_bytes > 9 * 2**20 > 6 * 2**20 >= found.peak_bytes
    True
    """
    check_analysis(analysis)
    if analysis.setup.mode == "infer":
        return plan_inference(analysis, budget)
    limit = resolve_limit(budget, max_overhead, max_overhead_flops)
    search = {"style": style, "strategy": load_choice(strategy), "time_limit_s": time_limit_s}
    if analysis.setup.mesh is None:
        return find_plan(analysis, limit, **search)
    return choose_plan(seek_rank_plans(analysis, by_flops=limit.by_flops, **search), limit)


def pareto(
    analysis: Analysis,
    *,
    by_flops: bool = False,
    points: int = 20,
    time_limit_s: float | None = None,
    style: str | None = None,
    strategy: str | Strategy | None = None,
) -> Front:
    """Lists the trade-offs of a step between memory and time.

    Args:
        analysis: Of a training step.
        by_flops: Count costs in FLOPs, else in time.
        points: Most plans to return, spread over the peaks.
        time_limit_s: As for :func:`fxmem.plan`.
        style: As for :func:`fxmem.plan`.
        strategy: As for :func:`fxmem.plan`.

    Returns:
        A tuple of plans, cheapest first; the first one recomputes nothing. Only :func:`fxmem.plan`
        says what each segment saves.

    Raises:
        UsageError: The step is not a training step, or there is no such style for it.
    """
    check_analysis(analysis)
    search = {"style": style, "strategy": load_choice(strategy), "time_limit_s": time_limit_s}
    if analysis.setup.mesh is None:
        return find_front(analysis, by_flops=by_flops, points=points, **search)
    points = min(points, _MOST_RECORDED)
    plans = seek_rank_plans(analysis, by_flops=by_flops, points=points, **search)
    return record_front(plans, by_flops)


@dataclass(frozen=True)
class RankPlans:
    """Plans for the step of a rank, each with its segments' modules, recorded when asked for."""

    analysis: Analysis
    front: tuple[Plan, ...]  # as one process has them, cheapest first
    ways: dict[str, Plan]  # plans of every so many blocks, by the names of these ways
    _recorded: dict[frozenset[str], Plan] = field(default_factory=dict)

    def record(self, plan: Plan) -> Plan:
        """Gives a plan of one process the figures of the rank, by recording the rank's step."""
        names = frozenset(segment.fqn for segment in iterate_segments(plan.segments))
        if names not in self._recorded:
            self._recorded[names] = self._record(plan)
        return self._recorded[names]

    def _record(self, plan: Plan) -> Plan:
        planned = self.analysis
        if plan.segments:
            blueprint = planned.blueprint
            model = apply(blueprint.model, plan)
            planned = analyze_again(replace(planned, blueprint=replace(blueprint, model=model)))
        runs = len([*iterate_segments(plan.segments)])
        overhead, overhead_flops = price_change(self.analysis, planned, runs)
        return replace(
            plan,
            baseline_peak_bytes=self.analysis.peak_bytes,
            peak_bytes=planned.peak_bytes,
            reserved_bytes=planned.reserved_bytes,
            overhead=overhead,
            overhead_flops=overhead_flops,
            analysis=planned,
        )

    def list_recorded(self) -> tuple[Plan, ...]:
        """Lists the plans that were recorded, cheapest first."""
        return tuple(sorted(self._recorded.values(), key=lambda p: (p.overhead, p.peak_bytes)))


def seek_rank_plans(
    analysis: Analysis,
    *,
    by_flops: bool = False,
    points: int = _FINE_POINTS,
    style: str | None = None,
    **search: Any,
) -> RankPlans:
    """Seeks plans for a step of a rank in one process; ``search`` goes to its planner.

    Raises:
        UsageError: The step is not a training step, or a style is asked for that it has not.
        TraceError: The step does not run in one process.
    """
    check_analysis(analysis)
    if style not in (None, MODULES):
        raise UsageError(
            f"style {style!r} rewrites a graph, and a rank's step has none", hint="style='modules'"
        )
    alone = _record_alone(analysis)
    if _recomputes(analysis) and not _recomputes(alone):
        raise UsageError(
            "parallelize checkpoints modules, and a plan would recompute within them again",
            hint="a parallelize without checkpoints, for which the plan is",
        )
    front = find_front(alone, by_flops=by_flops, points=points, style=MODULES, **search)
    model = analysis.blueprint.model
    fqns = {id(module): name for name, module in model.named_modules()}
    blocks = [fqns[id(block)] for block in find_blocks(model)]
    ways = {name: blocks[n - 1 :: n] for n, name in _EVERY.items() if blocks[n:]}
    return RankPlans(analysis, tuple(front), plan_modules(alone, ways))


def _recomputes(analysis: Analysis) -> bool:
    return any(operation.recomputed for operation in analysis.graph.operations)


def _record_alone(analysis: Analysis) -> Analysis:
    """Records the step in one process, without what processes share."""
    blueprint = analysis.blueprint
    options = replace(blueprint.options, layout=None, frontend="record")
    blueprint = replace(blueprint, options=options, make_optimizer=None)
    setup = replace(analysis.setup, mesh=None, parallelize=None, rank=0, optimizer=None)
    alone = analyze_again(replace(analysis, setup=setup, settings=None, blueprint=blueprint))
    storages = (replace(s, nbytes=0) if s.category in _SHARED else s for s in alone.graph.storages)
    return replace(alone, graph=replace(alone.graph, storages=tuple(storages)))


def choose_plan(plans: RankPlans, limit: Goal | None = None) -> Plan:
    """Records plans until the one that keeps a limit is found, by default the target GPU's memory.

    Leaner plans of one process are taken to be leaner on the rank: the front is searched by
    halves. The plans of every so many blocks come beside it.

    Raises:
        InfeasibleError: None does.
    """
    is_share = limit is not None and limit.overhead is not None

    def price(plan: Plan) -> float:
        return plan.overhead_flops if limit and limit.by_flops else plan.overhead

    def keeps(plan: Plan) -> bool:
        if limit is None:
            return plan.analysis is not None and plan.analysis.exhaustion is None
        if limit.overhead is not None:
            return price(plan) <= limit.overhead
        return plan.peak_bytes <= (limit.budget_bytes or 0)

    # Leaner plans keep a budget, cheaper ones a share.
    bisect_left(plans.front, True, key=lambda plan: keeps(plans.record(plan)) != is_share)
    recorded = [*map(plans.record, plans.ways.values()), *plans.list_recorded()]
    kept = [plan for plan in recorded if keeps(plan)]
    if is_share:
        return min(kept, key=lambda plan: (plan.peak_bytes, price(plan)))
    if not kept:
        least = format_bytes(min(plan.peak_bytes for plan in recorded))
        where = format_bytes(limit.budget_bytes) if limit and limit.budget_bytes else "the GPU"
        raise InfeasibleError(
            f"no plan within {where} was found; the leanest takes {least}",
            hint="a smaller batch, or more processes to share the model",
        )
    return min(kept, key=lambda plan: (price(plan), plan.peak_bytes))


def record_front(plans: RankPlans, by_flops: bool = False) -> Front:
    """Records all plans, and lists the ones that no other beats, cheapest first."""
    for plan in (*plans.front, *plans.ways.values()):
        plans.record(plan)
    return Front(
        prune(plans.list_recorded(), lambda p: p.overhead_flops if by_flops else p.overhead)
    )


def list_ways(plans: RankPlans) -> Iterator[tuple[str, Plan | CheckpointPrice]]:
    """Lists what was recorded, cheapest first, and torchtitan's checkpoints by operator."""
    names = {id(plans.record(plan)): name for name, plan in plans.ways.items()}
    found: list[tuple[str, Plan | CheckpointPrice]] = []
    for plan in plans.list_recorded():
        count = len([*iterate_segments(plan.segments)])
        modules = "1 module" if count == 1 else f"{count} modules"
        found.append((names.get(id(plan), modules if count else "nothing"), plan))
    price = _price_operators(plans.analysis)
    found += [(price.call, price)] if price else []
    yield from sorted(found, key=lambda way: way[1].overhead)


def _price_operators(analysis: Analysis) -> CheckpointPrice | None:
    """Prices checkpoints that keep every second product and attention; None where they fail."""
    layout = analysis.blueprint.options.layout

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        checkpoint_blocks(model, "ops")
        return parallelize_model(model, load_choice(layout.parallelize), mesh)

    try:
        changed = analyze_again(analysis, layout=replace(layout, parallelize=parallelize))
    except FxmemError:
        return None
    return CheckpointPrice("by operator", changed.peak_bytes, *price_change(analysis, changed))

"""The search for plans of an analysed step, of one process or of one rank of many."""

from __future__ import annotations

from fxmem.analysis import Analysis
from fxmem.applying.rank_plans import MOST_RECORDED, choose_plan, record_front, seek_rank_plans
from fxmem.planning.plan import Front, Plan
from fxmem.planning.planner import find_front, find_plan, plan_inference, resolve_limit
from fxmem.planning.prepared_step import check_analysis
from fxmem.planning.strategies.problem import Strategy
from fxmem.training.options import load_choice


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
    points = min(points, MOST_RECORDED)
    plans = seek_rank_plans(analysis, by_flops=by_flops, points=points, **search)
    return record_front(plans, by_flops)

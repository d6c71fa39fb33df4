"""Changes that recompute nothing: operations in place, and values deleted after their last use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fxmem.analysis import Analysis
from fxmem.planning.deletion import apply_deletions, find_deletions
from fxmem.planning.inplace.fx_nodes import NODE, find_overwriting
from fxmem.planning.inplace.inplace_changes import apply_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.outcome import measure_graph, measure_plan
from fxmem.planning.plan import InplaceChange, Plan, fingerprint_graph


def add_changes(analysis: Analysis, plan: Plan) -> Plan:
    """Adds to a training plan the changes to the user's own code that lower its step's peak.

    They are no part of the plan's peak: :func:`fxmem.apply` makes them in inference alone.
    """
    index = build_index(analysis.graph)
    inplace = tuple(change for change in find_inplace(index) if change.saving_bytes > 0)
    dels = tuple(point for point in find_deletions(index) if point.saving_bytes > 0)
    return replace(plan, inplace=inplace, dels=dels)


def plan_changes(analysis: Analysis) -> Plan:
    """Makes the plan of all changes together, with nothing recomputed: for inference."""
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
        plan = replace(plan, inplace=_keep_unwatched(plan.fx_graph, plan.inplace))
        peak_bytes, reserved_bytes = measure_plan(analysis, plan)
    return replace(plan, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes)


def _keep_unwatched(graph: Any, changes: Iterable[InplaceChange]) -> tuple[InplaceChange, ...]:
    """Keeps the changes that run in place under a plan: no hook may keep what they overwrite."""
    runs = {
        found.node.meta[NODE] for found in find_overwriting(graph, changes) if not found.is_watched
    }
    return tuple(change for change in changes if change.node in runs)

"""Changes that recompute nothing: operations in place, and values deleted after their last use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fxmem.analysis import Analysis
from fxmem.planning.dels.deletion import apply_deletions, find_deletions
from fxmem.planning.inplace.fx_nodes import NODE, find_overwriting
from fxmem.planning.inplace.overwriting import apply_inplace, choose_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.outcome import locate_segments, measure_graph, measure_plan
from fxmem.planning.plan import GRAPH, InplaceChange, Plan, fingerprint_graph


def add_changes(analysis: Analysis, plan: Plan) -> Plan:
    """Adds to a training plan the operations that can run in place beside its segments, and dels.

    No segment may begin between the node that makes a value and the one that overwrites it: the
    segment would take the value, or recompute it, as it is afterwards. Such changes are left out.
    Where the user's own code runs on (style ``"modules"``), all changes of that code are listed,
    and are no part of the peak.
    """
    index = build_index(analysis.graph)
    dels = tuple(point for point in find_deletions(index) if point.saving_bytes > 0)
    found = find_inplace(index)
    if plan.style != GRAPH:
        alone = tuple(change for change in found if change.saving_bytes > 0)
        return replace(plan, inplace=alone, dels=dels)
    found = _keep_unwatched(plan.fx_graph, found)
    segments = locate_segments(index, plan.segments)
    # A change that saves nothing in the code as it is may do so at the plan's own peak.
    options = [
        choose_inplace(analysis.graph, changes, segments)
        for changes in ([change for change in found if change.saving_bytes > 0], found)
    ]
    measured = [measure_plan(analysis, replace(plan, inplace=option)) for option in options]
    best = 0 if measured[0] <= measured[1] else 1
    peak_bytes, reserved_bytes = measured[best]
    return replace(
        plan,
        peak_bytes=min(peak_bytes, plan.peak_bytes),
        reserved_bytes=reserved_bytes,
        inplace=options[best],
        dels=dels,
    )


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

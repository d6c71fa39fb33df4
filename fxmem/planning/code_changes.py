"""Changes that recompute nothing: operations in place, and values deleted after their last use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fxmem.analysis import Analysis
from fxmem.planning.applied import locate_segments, measure_graph, measure_plan
from fxmem.planning.dels.deletion import apply_deletions, find_deletions
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.inplace.fx_nodes import NODE, find_overwriting
from fxmem.planning.inplace.overwriting import apply_inplace, choose_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.plan import GRAPH, InplaceChange, Plan


def add_changes(analysis: Analysis, plan: Plan) -> Plan:
    """A training plan with what can run in place beside its segments, and what is let go of.

    No segment may begin between what makes a value and what overwrites it: it would take the
    value, or compute it again, as it is afterwards. Such changes are left out. Where no graph
    takes the place of the user's own code (style ``"modules"``), all changes of that code are
    listed, and are no part of the peak.

    Args:
        analysis: Of the step.
        plan: With the segments.
    """
    recorded = build_index(analysis.graph)
    dels = tuple(point for point in find_deletions(recorded) if point.saving_bytes > 0)
    found = find_inplace(recorded)
    if plan.style != GRAPH:
        alone = tuple(change for change in found if change.saving_bytes > 0)
        return replace(plan, inplace=alone, dels=dels)
    found = _keep_unwatched(plan.fx_graph, found)
    alone = tuple(change for change in found if change.saving_bytes > 0)
    regions = locate_segments(recorded, plan.segments)
    options = (
        choose_inplace(analysis.graph, alone, regions),
        choose_inplace(analysis.graph, found, regions),
    )
    peaks = [_measure_with(analysis, plan, inplace) for inplace in options]
    # What saves nothing in the code as it is may do so at the plan's own peak.
    best = 0 if peaks[0] <= peaks[1] else 1
    peak_bytes, reserved_bytes = peaks[best]
    return replace(
        plan,
        peak_bytes=min(peak_bytes, plan.peak_bytes),
        reserved_bytes=reserved_bytes,
        inplace=options[best],
        dels=dels,
    )


def _keep_unwatched(graph: Any, changes: Iterable[InplaceChange]) -> tuple[InplaceChange, ...]:
    """Those that run in place where a plan is applied: no hook may keep what they overwrite."""
    runs = {
        found.node.meta[NODE] for found in find_overwriting(graph, changes) if not found.is_watched
    }
    return tuple(change for change in changes if change.node in runs)


def _measure_with(
    analysis: Analysis, plan: Plan, inplace: Sequence[InplaceChange]
) -> tuple[int, int]:
    return measure_plan(analysis, replace(plan, inplace=tuple(inplace)))


def plan_changes(analysis: Analysis) -> Plan:
    """The plan of all changes together, with nothing computed again: for inference.

    Args:
        analysis: Of the step.
    """
    recorded = build_index(analysis.graph)
    found = Plan(
        fingerprint=fingerprint_graph(analysis.graph),
        baseline_peak_bytes=analysis.peak_bytes,
        peak_bytes=analysis.peak_bytes,
        inplace=find_inplace(recorded),
        dels=find_deletions(recorded),
        mode=analysis.setup.mode,
        size_hint=analysis.setup.size_hint,
        fx_graph=analysis.fx_graph if analysis.frontend == "fx" else None,
    )
    if found.fx_graph is None:
        changed = apply_inplace(apply_deletions(analysis.graph, found.dels), found.inplace)
        peak_bytes, reserved_bytes = measure_graph(analysis, changed)
        return replace(found, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes)
    found = replace(found, inplace=_keep_unwatched(found.fx_graph, found.inplace))
    peak_bytes, reserved_bytes = measure_plan(analysis, found)
    return replace(found, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes)

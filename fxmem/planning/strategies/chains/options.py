"""Ways to run a stage: what to recompute inside it, from nothing to everything.

A sweep over the price of a byte weighs, for each run of nodes, what it would free against what its
inputs take: the convex hull of the trade-off, as by minimum cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange, Segments

_MAX_NODES = 80
"""Runs of nodes within a stage are compared in pairs; longer stages are swept coarsely."""
_PRICES = 10
_Run = tuple[int, int, int, float]
"""A segment's first node, the node after its last, the bytes it frees, what it costs."""


def list_options(
    step: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> tuple[Segments, ...]:
    """Lists ways to run a stage, for prices of a byte from nothing to everything.

    Args:
        step: The recorded step.
        limits: The nodes that may not be recomputed.
        costs: Of each operation.
        start: The first node of the stage.
        stop: The node after its last.

    Returns:
        Each once; the first has no segments.
    """
    runs = _list_runs(step, limits, costs, start, stop)
    found: dict[Segments, None] = {(): None}
    rates = [cost / nbytes for _, _, nbytes, cost in runs if nbytes > 0 and cost]
    if rates:
        for price in np.geomspace(min(rates) / 4, max(rates) * 4, _PRICES):
            found.setdefault(_choose_segments(runs, start, stop, float(price)))
    return tuple(found)


def _choose_segments(runs: Sequence[_Run], start: int, stop: int, price: float) -> Segments:
    """Chooses the segments that are worth most, where a byte is worth ``price``."""
    ending: dict[int, list[_Run]] = {}
    for run in runs:
        ending.setdefault(run[1], []).append(run)
    best: dict[int, float] = {start: 0.0}
    via: dict[int, _Run | None] = {}
    for node in range(start + 1, stop + 1):
        best[node], via[node] = best[node - 1], None
        for run in ending.get(node, ()):
            cost = best[run[0]] + run[3] - price * run[2]
            if cost < best[node]:
                best[node], via[node] = cost, run
    segments: list[SegmentRange] = []
    node = stop
    while node > start:
        last = via[node]
        if last is not None:
            segments.append(SegmentRange(last[0], last[1]))
        node = node - 1 if last is None else last[0]
    return tuple(reversed(segments))


def _list_runs(
    step: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> list[_Run]:
    """Lists the runs of nodes in a stage that may be a segment, and would free something.

    A segment frees what only its own nodes save, and holds its inputs for that.
    """
    first = step.first_operation
    base, end = first[start], step.end_operation[stop - 1]
    until = [0.0, *accumulate(costs[base:end])]
    stride = max(1, (stop - start) // _MAX_NODES)
    values = []  # the node that makes each, its bytes, readers, and the first node that saves it
    freed_at: dict[int, list[tuple[int, int]]] = {}  # by the last node that saves it
    for made in step.list_activations(base, end):
        if not made.is_output:
            savers = [stop if s.node is None else min(s.node, stop) for s in made.saves]
            values.append((made.node, made.nbytes, made.readers, min(savers, default=stop)))
            if savers:
                freed_at.setdefault(max(savers), []).append((min(savers), made.nbytes))
    runs: list[_Run] = []
    for head in range(start, stop, stride):
        if head in limits.starts or head in limits.fixed:
            continue
        taken: dict[int, int] = {}  # by the first node of a run from here that reads it
        for maker, nbytes, readers, saver in values:
            if maker < head <= saver:
                reader = next((node for node in readers if node >= head), stop)
                taken[reader] = taken.get(reader, 0) + nbytes
        freed, last = 0, first[head]
        for node in range(head, stop):
            if node in limits.fixed:
                break
            freed -= taken.get(node, 0)
            freed += sum(nbytes for saver, nbytes in freed_at.get(node, ()) if saver >= head)
            positions = (s.position for s in step.saves_by_node[node] if s.unpacked is not None)
            last = max([last, *positions])  # all that is saved is made once this has run
            if freed > 0 and ((node - start + 1) % stride == 0 or node + 1 == stop):
                runs.append((head, node + 1, freed, until[last - base] - until[first[head] - base]))
    return runs

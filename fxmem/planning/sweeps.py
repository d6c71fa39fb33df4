"""Ways to run a stage: what to compute again inside it, from nothing to everything.

A sweep over the price of a byte weighs, for each run of nodes, what it would free against what its
inputs take: the convex hull of the trade-off, as by minimum cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxmem.planning.facts import StepFacts
from fxmem.planning.limits import Limits
from fxmem.planning.regions import Region

MAX_STAGE_NODES = 80
"""Runs of nodes within a stage are compared in pairs; longer stages are swept coarsely."""
_PRICES = 10


def sweep_regions(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> tuple[tuple[Region, ...], ...]:
    """Regions among some nodes, for prices of a byte from nothing to everything.

    Args:
        facts: The step.
        limits: What may not be computed again.
        costs: Of each operation.
        start: The first of the nodes.
        stop: The node after the last.

    Returns:
        Each once; the first has no regions.
    """
    runs = _list_runs(facts, limits, costs, start, stop)
    found: dict[tuple[Region, ...], None] = {(): None}
    rates = [cost / nbytes for _, _, nbytes, cost in runs if nbytes > 0 and cost]
    if rates:
        for price in np.geomspace(min(rates) / 4, max(rates) * 4, _PRICES):
            found.setdefault(_choose_regions(runs, start, stop, float(price)), None)
    return tuple(found)


_Run = tuple[int, int, int, float]
"""A region's first node, the node after its last, the bytes it frees, what it costs."""


def _choose_regions(
    runs: Sequence[_Run], start: int, stop: int, price: float
) -> tuple[Region, ...]:
    """The regions that are worth most, where a byte is worth ``price``."""
    ending: dict[int, list[_Run]] = {}
    for run in runs:
        ending.setdefault(run[1], []).append(run)
    best = [0.0]
    back: list[_Run | None] = [None]
    for node in range(start + 1, stop + 1):
        least, via = best[-1], None
        for run in ending.get(node, ()):
            cost = best[run[0] - start] + run[3] - price * run[2]
            if cost < least:
                least, via = cost, run
        best.append(least)
        back.append(via)
    regions = []
    node = stop
    while node > start:
        last = back[node - start]
        if last is not None:
            regions.append(Region(last[0], last[1]))
        node = node - 1 if last is None else last[0]
    return tuple(reversed(regions))


def _list_runs(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> list[_Run]:
    """The runs of nodes in a stage that may be a region, and would free something.

    A region frees what only its own nodes save, and holds its inputs for that.
    """
    first = facts.first_operation
    until = np.concatenate(([0.0], np.cumsum(costs)))
    made = [m for m in facts.made if start <= m.node < stop and not m.is_output]
    step = max(1, (stop - start) // MAX_STAGE_NODES)
    saved_last: dict[int, list[tuple[int, int]]] = {}  # by the last node that saves it
    for storage in made:
        savers = [facts.nodes if s.node is None else s.node for s in storage.saves]
        if savers:
            saved_last.setdefault(max(savers), []).append((min(savers), storage.nbytes))
    runs: list[_Run] = []
    for head in range(start, stop, step):
        if head in limits.starts or head in limits.fixed:
            continue
        inputs = {m.index: m for m in made if m.node < head}
        freed, last = 0, first[head]
        for node in range(head, stop):
            if node in limits.fixed:
                break
            for storage in [m for m in inputs.values() if node in m.readers]:
                del inputs[storage.index]
                if not any(s.node is not None and s.node < head for s in storage.saves):
                    freed -= storage.nbytes
            freed += sum(size for saver, size in saved_last.get(node, ()) if saver >= head)
            positions = [s.position for s in facts.saves_by_node[node] if s.unpacked is not None]
            last = max([last, *positions])
            if freed > 0 and ((node + 1 - start) % step == 0 or node + 1 == stop):
                cost = float(until[max(last, first[head])] - until[first[head]])
                runs.append((head, node + 1, freed, cost))
    return runs

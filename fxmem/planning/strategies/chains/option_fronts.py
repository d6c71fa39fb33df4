"""Ways to run a stage: what to compute again inside it, from nothing to everything.

A sweep over the price of a byte weighs, for each run of nodes, what it would free against what its
inputs take: the convex hull of the trade-off, as by minimum cuts. It sees nothing of a stage but
its shape, in which positions count from the stage's own beginning: stages of the same shape, such
as the blocks of a transformer, are swept once, and the result is placed at each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.planning.model.index import Activation, StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange, shift_segments

MAX_STAGE_NODES = 80
"""Runs of nodes within a stage are compared in pairs; longer stages are swept coarsely."""
_PRICES = 10
Option = tuple[SegmentRange, ...]


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage as the sweep sees it. Nodes and operations count from its first.

    Attributes:
        costs: Of each operation of forward.
        first_operation: By node.
        last_saved: By node, up to which operation it has to run so that all that it saves is made.
        fixed: The nodes that may not be computed again.
        starts: The nodes that no segment may begin with.
        values: What it makes, but for what the model returns.
    """

    costs: tuple[float, ...]
    first_operation: tuple[int, ...]
    last_saved: tuple[int, ...]
    fixed: frozenset[int]
    starts: frozenset[int]
    values: tuple[ShapedValue, ...]


@dataclass(frozen=True, slots=True)
class ShapedValue:
    """A storage that a stage makes.

    Attributes:
        node: That makes it.
        nbytes: Its size.
        readers: The nodes of the stage that read it.
        savers: The first and the last node that saves it; the stage's size stands for all after
            it. None where nothing does.
    """

    node: int
    nbytes: int
    readers: tuple[int, ...]
    savers: tuple[int, int] | None


def list_stage_options(
    recorded: StepIndex, limits: Limits, costs: Sequence[float], bounds: Iterable[tuple[int, int]]
) -> list[tuple[Option, ...]]:
    """For each stage the ways to run it, for prices of a byte from nothing to everything.

    Args:
        recorded: The step.
        limits: What may not be computed again.
        costs: Of each operation.
        bounds: The first node of each stage, and the node after its last.

    Returns:
        For each stage, its ways, each once; the first has no segments.
    """
    known: dict[StageShape, tuple[Option, ...]] = {}
    found = []
    for start, stop in bounds:
        shape = describe_shape(recorded, limits, costs, start, stop)
        if shape not in known:
            known[shape] = list_shape_options(shape)
        found.append(tuple(shift_segments(option, start) for option in known[shape]))
    return found


def describe_shape(
    recorded: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> StageShape:
    """What the sweep sees of the nodes from one to another, which is left out."""
    first, end = recorded.first_operation[start], recorded.end_operation[stop - 1]
    nodes = range(start, stop)
    positions = (
        (
            save.position - first
            for save in recorded.saves_by_node[node]
            if save.unpacked is not None
        )
        for node in nodes
    )
    return StageShape(
        costs=tuple(costs[first:end]),
        first_operation=tuple(recorded.first_operation[node] - first for node in nodes),
        last_saved=tuple(max([0, *found]) for found in positions),
        fixed=frozenset(node - start for node in nodes if node in limits.fixed),
        starts=frozenset(node - start for node in nodes if node in limits.starts),
        values=tuple(
            _shape_value(made, start, stop)
            for made in recorded.list_activations(first, end)
            if not made.is_output
        ),
    )


def _shape_value(made: Activation, start: int, stop: int) -> ShapedValue:
    savers = [stop if s.node is None else min(s.node, stop) for s in made.saves]
    return ShapedValue(
        node=made.node - start,
        nbytes=made.nbytes,
        readers=tuple(node - start for node in made.readers if node < stop),
        savers=(min(savers) - start, max(savers) - start) if savers else None,
    )


def list_shape_options(shape: StageShape) -> tuple[Option, ...]:
    """The ways to run a stage, as segments that count from its first node."""
    runs = _list_runs(shape)
    found: dict[Option, None] = {(): None}
    rates = [cost / nbytes for _, _, nbytes, cost in runs if nbytes > 0 and cost]
    if rates:
        for price in np.geomspace(min(rates) / 4, max(rates) * 4, _PRICES):
            segments = _choose_segments(runs, len(shape.first_operation), float(price))
            found.setdefault(segments, None)
    return tuple(found)


_Run = tuple[int, int, int, float]
"""A segment's first node, the node after its last, the bytes it frees, what it costs."""


def _choose_segments(runs: Sequence[_Run], size: int, price: float) -> Option:
    """The segments that are worth most, where a byte is worth ``price``."""
    ending: dict[int, list[_Run]] = {}
    for run in runs:
        ending.setdefault(run[1], []).append(run)
    best = [0.0]
    back: list[_Run | None] = [None]
    for node in range(1, size + 1):
        least, via = best[-1], None
        for run in ending.get(node, ()):
            cost = best[run[0]] + run[3] - price * run[2]
            if cost < least:
                least, via = cost, run
        best.append(least)
        back.append(via)
    segments = []
    node = size
    while node > 0:
        last = back[node]
        if last is not None:
            segments.append(SegmentRange(last[0], last[1]))
        node = node - 1 if last is None else last[0]
    return tuple(reversed(segments))


def _list_runs(shape: StageShape) -> list[_Run]:
    """The runs of nodes in a stage that may be a segment, and would free something.

    A segment frees what only its own nodes save, and holds its inputs for that.
    """
    size, first = len(shape.first_operation), shape.first_operation
    until = np.concatenate(([0.0], np.cumsum(shape.costs)))
    step = max(1, size // MAX_STAGE_NODES)
    saved_last: dict[int, list[tuple[int, int]]] = {}  # by the last node that saves it
    for value in shape.values:
        if value.savers:
            saved_last.setdefault(value.savers[1], []).append((value.savers[0], value.nbytes))
    runs: list[_Run] = []
    for head in range(0, size, step):
        if head in shape.starts or head in shape.fixed:
            continue
        taken: dict[int, int] = {}  # by the first node of a run from here that reads it
        for value in shape.values:
            if value.node < head and (value.savers is None or value.savers[0] >= head):
                reader = next((node for node in value.readers if node >= head), size)
                taken[reader] = taken.get(reader, 0) + value.nbytes
        freed, last = 0, first[head]
        for node in range(head, size):
            if node in shape.fixed:
                break
            freed -= taken.get(node, 0)
            freed += sum(nbytes for saver, nbytes in saved_last.get(node, ()) if saver >= head)
            last = max(last, shape.last_saved[node])
            if freed > 0 and ((node + 1) % step == 0 or node + 1 == size):
                cost = float(until[max(last, first[head])] - until[first[head]])
                runs.append((head, node + 1, freed, cost))
    return runs

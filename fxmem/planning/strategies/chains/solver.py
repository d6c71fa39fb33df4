"""The cheapest schedule of a chain under a memory budget, for many budgets at once.

``C(s, t, m)`` is the least cost of running stages ``s..t`` and their backward, where ``m`` covers
all that is live then but the input of ``s``: what the stages save, the inputs of later segments,
the gradients of both ends, transients, and ``held_bytes`` of the stage at which backward stands.
What runs around these stages has been taken off ``m`` already. The last stage is always kept:
a segment at the end would be run, and then run again at once.

The first entry is one of the following. Write ``x``, ``g``, ``h`` for input, gradient and held
bytes, ``a``, ``of``, ``ob`` for an option's saved bytes and peaks, ``o`` for the peak of a forward
that keeps nothing, and ``e = h[t] + g[t+1]`` for what is there all through the forward of
``s..t``; where ``t`` ends the chain that is the step's own forward, which has no gradient yet and
whose cost is free.

- Keep ``s``: then ``C(s+1, t, m - a)``. Forward needs ``m >= e + a + of``. In backward the later
  stages are done and backward stands at ``s``: ``m >= h[s] + g[s] + g[s+1] + a + ob``.
- SegmentRange ``s..j-1``: then ``C(j, t, m - x[j])``, and after that, with ``x[j]`` gone,
  ``C(s, j-1, m)``, the body. Forward needs ``m >= e + [i > s] x[i] + x[i+1] + o[i]`` for each
  ``i`` of the segment.

Two tables over slots of memory are filled. One rounds every size up, so what it finds fits; the
other rounds every size and the budget down, so no schedule costs less than it says. Schedules are
then read from the tables with exact bytes: of the first entries that leave enough memory (the
least that stages ``s..t`` can do with follows the same recurrences with max for sum, without
slots), the one that a table, or the mean of both, values best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fxmem.planning.strategies.chains.chain import (
    Chain,
    Kept,
    Recomputed,
    Schedule,
    ScheduleMeasure,
    keep_stages,
    measure_schedule,
)

DEFAULT_SLOTS = 500
"""Steps of memory per budget: one takes 0.2 s for 60 stages of 4 options."""

_Costs: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChainSolution:
    """A schedule for one budget.

    Attributes:
        schedule: What to keep and what to compute again.
        peak_bytes: Its peak, at most the budget.
        cost: What it computes more than once.
        lower_bound_cost: No schedule within the budget costs less.
    """

    schedule: Schedule
    peak_bytes: int
    cost: float
    lower_bound_cost: float


@dataclass(frozen=True, slots=True)
class _Entries:
    """What stages ``s..t`` can begin with: the options of ``s``, then segments of growing length.

    Attributes:
        needed: Memory that the entry's own runs need.
        taken: Memory that the stages after it no longer have.
        cost: Its own cost, without that of a body.
        options: How many of them are options.
    """

    needed: NDArray[np.int64]
    taken: NDArray[np.int64]
    cost: _Costs
    options: int


@dataclass(frozen=True, slots=True)
class _Problem:
    """A chain, what any part of it can begin with, and the least memory that each part needs."""

    chain: Chain
    entries: Mapping[tuple[int, int], _Entries]
    least: _Costs

    @property
    def least_bytes(self) -> int | None:
        """The least memory for the whole chain; None where some stage has no option."""
        least = self.least[0, -1] + self.chain.stages[0].input_bytes
        return int(least) if np.isfinite(least) else None


@dataclass(frozen=True, slots=True)
class _Tables:
    """``C(s, t, m)`` by slots of memory, with sizes rounded up and down.

    Attributes:
        slot_bytes: Bytes of a slot.
        lower: Lower bounds of the cost.
        guides: What schedules are read from: upper bounds, lower bounds, and their mean.
    """

    slot_bytes: int
    lower: _Costs
    guides: tuple[_Costs, ...]


def find_least_memory(chain: Chain) -> int | None:
    """The smallest budget in bytes that a chain can run in; exact.

    None where a stage has no option.

    >>> from fxmem.planning.strategies.chains.chain import Stage, StageOption
    >>> keep = (StageOption(saved_bytes=10),)
    >>> find_least_memory(Chain((Stage(1, 1, 1.0, keep), Stage(1, 1, 1.0, keep))))
    13
    """
    return _build_problem(chain).least_bytes


def solve_chain(
    chain: Chain, budgets: Sequence[int], slots: int = DEFAULT_SLOTS
) -> tuple[ChainSolution | None, ...]:
    """The cheapest schedules under some budgets.

    Tables are shared by the budgets within a factor of two of each other; each takes time in
    ``slots * stages ** 3``. With a slot of one byte, ``cost`` is exactly optimal.

    Args:
        chain: The stages.
        budgets: Bytes, the chain's input and ``held_bytes`` included, in any order.
        slots: Steps of memory that a budget is divided into.

    Returns:
        For each budget a schedule with ``peak_bytes`` within it, never dearer than that of a
        smaller budget; None where no schedule fits.

    >>> from fxmem.planning.strategies.chains.chain import Stage, StageOption
    >>> keep = (StageOption(saved_bytes=10),)
    >>> chain = Chain((Stage(1, 1, 3.0, keep), Stage(1, 1, 5.0, keep)))
    >>> [found and found.cost for found in solve_chain(chain, (12, 13, 21, 22))]
    [None, 3.0, 3.0, 0.0]
    """
    problem = _build_problem(chain)
    least, freest = problem.least_bytes, keep_stages(chain)
    if least is None or freest is None:
        return (None,) * len(budgets)
    kept = measure_schedule(chain, freest)
    free = ChainSolution(freest, kept.peak_bytes, kept.cost, kept.cost)
    found: dict[int, ChainSolution | None] = {}
    tables, ceiling = None, 0
    for budget in sorted(set(budgets), reverse=True):
        if budget < least:
            found[budget] = None
            continue
        if budget >= kept.peak_bytes:
            found[budget] = free
            continue
        if tables is None or 2 * budget < ceiling:
            ceiling, tables = budget, _fill_tables(problem, budget, slots)
        found[budget] = _solve_budget(problem, tables, budget)
    return _take_from_smaller(found, budgets)


def _take_from_smaller(
    found: Mapping[int, ChainSolution | None], budgets: Sequence[int]
) -> tuple[ChainSolution | None, ...]:
    """Solutions in the order asked for, each at least as cheap as those of smaller budgets."""
    best: dict[int, ChainSolution | None] = {}
    cheapest: ChainSolution | None = None
    for budget in sorted(found):
        solution = found[budget]
        if solution and (cheapest is None or solution.cost <= cheapest.cost):
            cheapest = solution
        elif solution and cheapest:
            solution = replace(cheapest, lower_bound_cost=solution.lower_bound_cost)
        best[budget] = solution
    return tuple(best[budget] for budget in budgets)


def _build_problem(chain: Chain) -> _Problem:
    entries = _list_entries(chain)
    count = len(chain.stages)
    # One row more, for what follows the last stage: nothing, which needs nothing.
    least = np.full((count + 1, count), np.inf)
    for last in range(count):
        least[last + 1, last] = 0
        for start in range(last, -1, -1):
            needs = _find_needs(entries[start, last], least, start, last)
            least[start, last] = needs.min(initial=np.inf)
    return _Problem(chain, entries, least)


def _find_needs(entries: _Entries, least: _Costs, start: int, last: int) -> _Costs:
    """The least memory for stages ``start..last``, by what they begin with."""
    after = np.empty(len(entries.needed))
    after[: entries.options] = least[start + 1, last]
    after[entries.options :] = least[start + 1 : last + 1, last]
    needs = np.maximum(entries.needed, after + entries.taken)
    bodies = needs[entries.options :]
    np.maximum(bodies, least[start, start:last], out=bodies)
    return needs


def _list_entries(chain: Chain) -> dict[tuple[int, int], _Entries]:
    """What stages ``s..t`` can begin with, for all ``s <= t``."""
    stages = chain.stages
    sizes = np.array(chain.boundary_bytes, np.int64)
    gradients = chain.boundary_gradient_bytes
    peaks = sizes[:-1] + sizes[1:] + [stage.forward_peak_bytes for stage in stages]
    costs = np.cumsum([0.0, *(stage.cost for stage in stages)])
    found = {}
    for start, stage in enumerate(stages):
        options = np.array(
            [(o.saved_bytes, o.forward_peak_bytes, o.backward_peak_bytes) for o in stage.options],
            np.int64,
        ).reshape(-1, 3)
        saved, forward, backward = options.T
        extra = np.array([o.cost for o in stage.options], np.float64)
        tail_cost = np.array([o.tail_cost for o in stage.options], np.float64)
        edges = stage.held_bytes + gradients[start] + gradients[start + 1]
        runs = peaks[start:].copy()
        runs[0] -= sizes[start]
        runs = np.maximum.accumulate(runs)
        for last in range(start, len(stages)):
            again = last + 1 < len(stages)
            around = stages[last].held_bytes + (gradients[last + 1] if again else 0)
            kept = saved + np.maximum(around + forward, edges + backward)
            cost = extra + (stage.cost - (tail_cost if start == last else 0) if again else 0)
            segments = costs[start + 1 : last + 1] - costs[start]
            found[start, last] = _Entries(
                needed=np.concatenate([kept, around + runs[: last - start]]),
                taken=np.concatenate([saved, sizes[start + 1 : last + 1]]),
                cost=np.concatenate([cost, segments if again else 0 * segments]),
                options=len(stage.options),
            )
    return found


def _fill_tables(problem: _Problem, budget: int, slots: int) -> _Tables:
    """Tables for all budgets up to one."""
    available = budget - problem.chain.stages[0].input_bytes
    slot_bytes = max(1, -(-available // slots))
    count = available // slot_bytes
    upper = _fill_table(problem, slot_bytes, count, up=True)
    lower = _fill_table(problem, slot_bytes, count, up=False)
    mean = (np.where(np.isfinite(upper), upper, lower) + lower) / 2
    return _Tables(slot_bytes, lower, guides=(upper, lower, mean))


def _fill_table(problem: _Problem, slot_bytes: int, slots: int, up: bool) -> _Costs:
    """``C`` by first stage, last stage and slots of memory; inf where nothing fits."""

    def round_sizes(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        # Past the table it makes no difference how much is needed.
        return np.minimum(-(-sizes // slot_bytes) if up else sizes // slot_bytes, slots + 1)

    count = len(problem.chain.stages)
    memory = np.arange(slots + 1)
    inputs = round_sizes(np.array(problem.chain.boundary_bytes, np.int64))
    table = np.full((count + 1, count, slots + 1), np.inf)
    for last in range(count):
        table[last + 1, last] = 0
        # C(j, last, m - x[j]), the same for every first stage.
        shifted = np.full((count, slots + 1), np.inf)
        for start in range(last, -1, -1):
            entries = problem.entries[start, last]
            needed, taken = round_sizes(entries.needed), round_sizes(entries.taken)
            row = table[start, last]
            for k in range(entries.options):
                low = needed[k]
                rest = table[start + 1, last, low - taken[k] : slots + 1 - taken[k]]
                np.minimum(row[low:], rest + entries.cost[k], out=row[low:])
            if start < last:
                sums = shifted[start + 1 : last + 1] + table[start, start:last]
                sums += entries.cost[entries.options :, None]
                sums[memory < needed[entries.options :, None]] = np.inf
                np.minimum(row, sums.min(axis=0), out=row)
            # Sizes rounded down may seem to fit where exact ones do not.
            row[: int(min(problem.least[start, last] // slot_bytes, slots + 1))] = np.inf
            shifted[start, inputs[start] :] = row[: slots + 1 - inputs[start]]
    return table


def _solve_budget(problem: _Problem, tables: _Tables, budget: int) -> ChainSolution:
    """The best schedule that a table leads to; the budget is one that something fits."""
    chain = problem.chain
    memory = budget - chain.stages[0].input_bytes
    best: tuple[ScheduleMeasure, Schedule] | None = None
    for guide in tables.guides:
        schedule = _read_schedule(problem, guide, tables.slot_bytes, len(chain.stages) - 1, memory)
        measure = measure_schedule(chain, schedule)
        if best is None or measure.cost < best[0].cost:
            best = measure, schedule
    assert best is not None
    measure, schedule = best
    # The same sum in another order may come out above.
    bound = min(float(tables.lower[0, -1, memory // tables.slot_bytes]), measure.cost)
    return ChainSolution(schedule, measure.peak_bytes, measure.cost, bound)


def _read_schedule(
    problem: _Problem, table: _Costs, slot_bytes: int, last: int, memory: int, start: int = 0
) -> Schedule:
    """A schedule of stages ``start..last`` in some bytes, by what a table says of the rest."""
    found: list[Kept | Recomputed] = []
    while start <= last:
        entries = problem.entries[start, last]
        rest = np.maximum(memory - entries.taken, 0) // slot_bytes
        after = np.full(len(rest), start + 1)
        after[entries.options :] = np.arange(start + 1, last + 1)
        values = entries.cost + table[after, last, rest]
        values[entries.options :] += table[start, start:last, memory // slot_bytes]
        fits = _find_needs(entries, problem.least, start, last) <= memory
        # Where sizes rounded up leave nothing, whatever fits will do.
        values = np.where(fits, np.minimum(values, np.finfo(float).max), np.inf)
        choice = int(values.argmin())
        if choice < entries.options:
            found.append(Kept(start, choice))
            following = start + 1
        else:
            following = start + 1 + choice - entries.options
            body = _read_schedule(problem, table, slot_bytes, following - 1, memory, start)
            found.append(Recomputed(start, following, body))
        memory -= int(entries.taken[choice])
        start = following
    return tuple(found)

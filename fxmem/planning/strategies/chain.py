"""A chain of stages, and the cheapest schedules that run it in some memory.

The model is that of Beaumont, Herrmann et al., "Optimal checkpointing for heterogeneous chains"
(2019), with several options per stage as in Rockmate (Zhao et al., 2023). A schedule is what
nested ``torch.utils.checkpoint(use_reentrant=False)`` calls do, early stop included.

What is live, and when. Backward *stands* at stage ``p`` when the stages after ``p`` are done and
``p`` is next; ``held_bytes`` of stage ``p`` is then taken. All of forward stands at the last
stage. Running stages ``s..t`` has backward stand at ``t``, holds the input of ``s`` (which whoever
runs them holds already) and, where they are run again, the gradient of the output of ``t``. In
stage order,

- a kept stage runs with ``saved_bytes + forward_peak_bytes`` beside its input, and from then on
  ``saved_bytes`` stay until its backward;
- a segment runs its stages ``i`` with their input, output and ``forward_peak_bytes`` live, and from
  then on its input (held already) and the input of what follows it stay, that until the backward
  of what follows is done.

Then, from the last to the first, a kept stage runs its backward beside its input, with what it
saved, both gradients and ``backward_peak_bytes``; a segment is run again, by its own body.

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

A table over slots of memory, filled with every size rounded down, bounds the cost from below.
Schedules are then read from the table with exact bytes: of the first entries that leave enough
memory (the least that stages ``s..t`` can do with follows the same recurrences with max for sum,
without slots), the one that the table values best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

DEFAULT_SLOTS = 500
"""Steps of memory per budget: one takes 0.1 s for 60 stages of 4 options."""

_Costs: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage so that its backward can follow."""

    # kept from its forward until its backward beside its input; with the input it holds all
    # of the output, whatever the next stage does
    saved_bytes: int
    cost: float = 0.0  # what is computed again inside its own backward; 0 where everything is kept
    forward_peak_bytes: int = 0  # what its forward holds above its input and ``saved_bytes``
    # what its backward holds above its input, ``saved_bytes`` and the gradients of both ends.
    # Less than 0 where much of ``saved_bytes`` is there for the next stage only, which is
    # done by then.
    backward_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a chain. Costs are seconds or FLOPs, the same for the whole chain."""

    input_bytes: int  # the storages that cross the boundary before it
    gradient_bytes: int  # the gradients of those
    cost: float  # of one forward
    options: tuple[StageOption, ...]  # the ways to run it so that its backward can follow
    # what a forward that keeps nothing holds above its input and output
    forward_peak_bytes: int = 0
    # what is taken, whatever the schedule, while backward stands at this stage: gradients of
    # parameters made by the stages after it, tensors that span many stages
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that run one after the other, each on what the one before it hands over."""

    stages: tuple[Stage, ...]  # in the order of forward
    output_bytes: int = 0  # what the last stage hands over; the loss
    gradient_bytes: int = 0  # the gradient of that, there from the end of forward

    def list_crossing(self) -> tuple[list[int], list[int]]:
        """Lists the bytes that cross each boundary in forward, and their gradients in backward."""
        inputs = [*(stage.input_bytes for stage in self.stages), self.output_bytes]
        return inputs, [*(stage.gradient_bytes for stage in self.stages), self.gradient_bytes]


@dataclass(frozen=True, slots=True)
class Kept:
    """A stage that keeps what its backward needs, by one of its options."""

    stage: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Stages under one checkpoint: only their input is kept, and backward runs them again."""

    start: int  # the first stage
    stop: int  # the stage after the last
    body: Schedule  # how they are run when they are run again


Schedule: TypeAlias = tuple["Kept | Recomputed", ...]
"""Entries in the order of the stages; every stage is in exactly one."""


def keep_stages(chain: Chain) -> tuple[Kept, ...]:
    """Runs every stage once, by the cheapest and then smallest of its options.

    Nothing costs less.

    >>> options = (StageOption(4, cost=1.0), StageOption(9), StageOption(8))
    >>> keep_stages(Chain((Stage(0, 0, cost=2.0, options=options),)))
    (Kept(stage=0, option=2),)
    """
    found = (min((o.cost, o.saved_bytes, k) for k, o in enumerate(s.options)) for s in chain.stages)
    return tuple(Kept(index, option) for index, (_, _, option) in enumerate(found))


def measure_kept(chain: Chain) -> int:
    """Measures the most that is live, ``held_bytes`` included, where every stage runs once.

    >>> stage = Stage(1, 1, cost=3.0, options=(StageOption(saved_bytes=10),))
    >>> measure_kept(Chain((stage, stage)))
    22
    """
    stages, (_, gradients) = chain.stages, chain.list_crossing()
    chosen = [stages[kept.stage].options[kept.option] for kept in keep_stages(chain)]
    live, peak = stages[0].input_bytes, 0
    for option in chosen:
        rise = option.saved_bytes + option.forward_peak_bytes
        peak = max(peak, stages[-1].held_bytes + live + rise)
        live += option.saved_bytes
    for at in reversed(range(len(stages))):
        edges = gradients[at] + gradients[at + 1]
        peak = max(peak, stages[at].held_bytes + live + edges + chosen[at].backward_peak_bytes)
        live -= chosen[at].saved_bytes
    return peak


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries that ``s..t`` can begin with: the options of ``s``, then ever longer segments."""

    needed: NDArray[np.int64]  # memory that the entry's own runs need
    taken: NDArray[np.int64]  # memory that the stages after it no longer have
    cost: _Costs  # its own cost, without that of a body
    options: int  # how many of them are options


_AllEntries: TypeAlias = Mapping[tuple[int, int], _Entries]


def find_least_memory(chain: Chain) -> int:
    """Finds the smallest budget in bytes that a chain can run in; exact.

    >>> keep = (StageOption(saved_bytes=10),)
    >>> find_least_memory(Chain((Stage(1, 1, 1.0, keep), Stage(1, 1, 1.0, keep))))
    13
    """
    least = _find_least(chain, _list_entries(chain))
    return int(least[0, -1]) + chain.stages[0].input_bytes


def solve_chain(
    chain: Chain, budgets: Sequence[int], slots: int = DEFAULT_SLOTS
) -> tuple[Schedule, ...]:
    """Finds the cheapest schedules under some budgets.

    Tables are shared by the budgets within a factor of two of each other; each takes time in
    ``slots * stages ** 3``. With a slot of one byte, schedules are exactly optimal.

    Budgets are bytes, the chain's input and ``held_bytes`` included, and at least what
    :func:`find_least_memory` finds.

    >>> keep = (StageOption(saved_bytes=10),)
    >>> chain = Chain((Stage(1, 1, 3.0, keep), Stage(1, 1, 5.0, keep)))
    >>> some, all_kept = solve_chain(chain, (13, 22))
    >>> len(some), some[0].stop, all_kept == keep_stages(chain)
    (2, 1, True)
    """
    entries = _list_entries(chain)
    least = _find_least(chain, entries)
    held_bytes = chain.stages[0].input_bytes
    found: dict[int, Schedule] = {}
    ceiling, slot_bytes, table = 0, 1, least[..., None]
    for budget in sorted(set(budgets), reverse=True):
        if not ceiling or 2 * budget < ceiling:
            ceiling, slot_bytes = budget, max(1, -(-(budget - held_bytes) // slots))
            size = (budget - held_bytes) // slot_bytes
            table = _fill_table(chain, entries, least, slot_bytes, size)
        found[budget] = _read_schedule(
            entries, least, table, slot_bytes, (0, len(chain.stages) - 1), budget - held_bytes
        )
    return tuple(found[budget] for budget in budgets)


def _list_entries(chain: Chain) -> _AllEntries:
    """Lists what stages ``s..t`` can begin with, for all ``s <= t``."""
    stages = chain.stages
    inputs, gradients = chain.list_crossing()
    sizes = np.array(inputs, np.int64)
    peaks = sizes[:-1] + sizes[1:] + [stage.forward_peak_bytes for stage in stages]
    costs = np.cumsum([0.0, *(stage.cost for stage in stages)])
    found = {}
    for start, stage in enumerate(stages):
        saved, forward, backward = np.array(
            [(o.saved_bytes, o.forward_peak_bytes, o.backward_peak_bytes) for o in stage.options],
            np.int64,
        ).T
        extra = np.array([o.cost for o in stage.options], np.float64)
        edges = stage.held_bytes + gradients[start] + gradients[start + 1]
        runs = peaks[start:].copy()
        runs[0] -= sizes[start]
        runs = np.maximum.accumulate(runs)
        for last in range(start, len(stages)):
            again = last + 1 < len(stages)
            around = stages[last].held_bytes + (gradients[last + 1] if again else 0)
            kept = saved + np.maximum(around + forward, edges + backward)
            segments = costs[start + 1 : last + 1] - costs[start]
            found[start, last] = _Entries(
                needed=np.concatenate([kept, around + runs[: last - start]]),
                taken=np.concatenate([saved, sizes[start + 1 : last + 1]]),
                cost=np.concatenate([extra + again * stage.cost, again * segments]),
                options=len(stage.options),
            )
    return found


def _find_least(chain: Chain, entries: _AllEntries) -> _Costs:
    """Finds the least memory that stages ``s..t`` need."""
    count = len(chain.stages)
    # One row more, for what follows the last stage: nothing, which needs nothing.
    least = np.full((count + 1, count), np.inf)
    for last in range(count):
        least[last + 1, last] = 0
        for start in range(last, -1, -1):
            least[start, last] = _find_needs(entries[start, last], least, start, last).min()
    return least


def _find_needs(entries: _Entries, least: _Costs, start: int, last: int) -> _Costs:
    """Finds the least memory for stages ``start..last``, by what they begin with."""
    after = np.empty(len(entries.needed))
    after[: entries.options] = least[start + 1, last]
    after[entries.options :] = least[start + 1 : last + 1, last]
    needs = np.maximum(entries.needed, after + entries.taken)
    bodies = needs[entries.options :]
    np.maximum(bodies, least[start, start:last], out=bodies)
    return needs


def _fill_table(
    chain: Chain, all_entries: _AllEntries, least: _Costs, slot_bytes: int, slots: int
) -> _Costs:
    """Fills in ``C`` by first stage, last stage and slots of memory; inf where nothing fits."""

    def round_sizes(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(sizes // slot_bytes, slots + 1)  # past the table all is the same

    count = len(chain.stages)
    memory = np.arange(slots + 1)
    inputs = round_sizes(np.array(chain.list_crossing()[0], np.int64))
    table = np.full((count + 1, count, slots + 1), np.inf)
    for last in range(count):
        table[last + 1, last] = 0
        # C(j, last, m - x[j]), the same for every first stage.
        shifted = np.full((count, slots + 1), np.inf)
        for start in range(last, -1, -1):
            entries = all_entries[start, last]
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
            row[: int(min(least[start, last] // slot_bytes, slots + 1))] = np.inf
            shifted[start, inputs[start] :] = row[: slots + 1 - inputs[start]]
    return table


def _read_schedule(
    all_entries: _AllEntries,
    least: _Costs,
    table: _Costs,
    slot_bytes: int,
    stages: tuple[int, int],
    memory: int,
) -> Schedule:
    """Reads a schedule of stages, first and last, in some bytes that they can run in."""
    start, last = stages
    found: list[Kept | Recomputed] = []
    while start <= last:
        entries = all_entries[start, last]
        rest = np.maximum(memory - entries.taken, 0) // slot_bytes
        after = np.full(len(rest), start + 1)
        after[entries.options :] = np.arange(start + 1, last + 1)
        values = entries.cost + table[after, last, rest]
        values[entries.options :] += table[start, start:last, memory // slot_bytes]
        fits = _find_needs(entries, least, start, last) <= memory
        choice = int(np.where(fits, values, np.inf).argmin())
        if choice < entries.options:
            found.append(Kept(start, choice))
            start += 1
        else:
            stop = start + 1 + choice - entries.options
            body = _read_schedule(all_entries, least, table, slot_bytes, (start, stop - 1), memory)
            found.append(Recomputed(start, stop, body))
            start = stop
        memory -= int(entries.taken[choice])
    return tuple(found)

"""The peak and the cost of a plan, a hundred times faster than simulating its step.

What a segment adds to the step depends on nothing but itself: when it runs again, the most that its
runs hold, and how long what they make lives on. That is worked out once for each segment, by the
code that simulates, and then only added up. How long what forward made lives is the latest of what
its readers and savers ask for, each of which depends on one segment or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.graph import RESIDENT, Phase
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.live_intervals import LiveInterval, SegmentIntervals
from fxmem.planning.model.recomputation import Run, iterate_recomputations, plan_recomputations
from fxmem.planning.model.segments import SegmentRange

Ints = NDArray[np.int64]
_SPREAD = 1 << 24
"""Places between two operations of the recorded step, for what runs again there."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one segment adds to a step.

    Attributes:
        segment: The segment.
        cost: Of what it computes again.
        done: After which operation nothing of it is needed; -1 where backward needs nothing.
        read_end: How long forward holds what its nodes take from before it.
        changes: Operations and by how much what lives during them changes from there on; behind
            all operations, likewise for what is still alive once they are over.
        runs: Before which operation it runs again, and the most that it then adds to what is alive.
        inner: The storages it makes, as positions in ``step.made``, and where its own frames let
            go of each.
        libraries: Names of what its libraries keep.
    """

    segment: SegmentRange
    cost: float
    done: int
    read_end: int
    changes: Ints
    runs: Ints
    inner: Ints
    libraries: frozenset[str]


class Scorer:
    """Scores plans of one step.

    Args:
        step: The step.
        costs: Of each operation, by its index.
    """

    def __init__(self, step: StepIndex, costs: Sequence[float]) -> None:
        self._step = step
        self._costs = np.array([0.0, *np.cumsum(costs)])
        self._size = len(step.graph.operations)
        self._places = [index * _SPREAD for index in range(self._size)]
        self._parts: dict[SegmentRange, _Part] = {}
        operations = step.graph.operations
        self._workspaces = np.array([o.workspace_bytes for o in operations], dtype=np.int64)
        self._taken = {name for o in operations if o.phase is Phase.BACKWARD for name in o.keeps}
        self._library_bytes = {s.name: s.nbytes for s in step.graph.storages}
        self._sizes = [storage.nbytes for storage in step.graph.storages]
        self._fixed = self._measure_fixed()
        made = step.made
        self._nbytes = np.array([m.nbytes for m in made], dtype=np.int64)
        self._born = np.array(step.births, dtype=np.int64)
        self._maker = np.array([m.node for m in made], dtype=np.int64)
        self._least_end = np.array(
            [self._find_least_end(position) for position in range(len(made))], dtype=np.int64
        )
        readers = [
            (at, first, last)
            for at, m in enumerate(made)
            for first, last in (*((node, node) for node in m.readers), *m.consumers)
        ]
        self._readers = np.array(readers, dtype=np.int64).reshape(-1, 3)
        self._reader_ends = np.array(
            [self._find_read_end(node) for _, node, _ in readers], dtype=np.int64
        )
        savers = [
            (
                at,
                len(step.graph.nodes) if s.node is None else s.node,
                self._find_release(at, s.released),
            )
            for at, m in enumerate(made)
            for s in m.saves
        ]
        self._savers = np.array(savers, dtype=np.int64).reshape(-1, 3)

    def score(self, segments: Iterable[SegmentRange]) -> tuple[int, float]:
        """The peak in bytes and the cost of some segments, apart from each other and in order."""
        parts = [self._find_part(segment) for segment in segments]
        ends = self._find_ends(parts)
        totals = self._fixed.copy()
        np.subtract.at(totals[0], ends + 1, self._nbytes)
        np.subtract.at(totals[1], np.maximum(ends, self._born), self._nbytes)
        if parts:
            at, nbytes = _join([part.changes for part in parts])
            np.add.at(totals.reshape(-1), at, nbytes)
        during, after = np.cumsum(totals, axis=1)
        peak = int((during[: self._size] + self._workspaces).max())
        if parts:
            triggers, most = _join([part.runs for part in parts])
            peak = max(peak, int((after[triggers - 1] + most).max(initial=0)))
        libraries = frozenset().union(*(part.libraries for part in parts)) - self._taken
        peak += sum(self._library_bytes[name] for name in libraries)
        return peak, float(sum(part.cost for part in parts))

    # -- what forward made ----------------------------------------------------------------------

    def _find_ends(self, parts: Sequence[_Part]) -> Ints:
        """The operation after which each storage that forward made is freed."""
        nodes = len(self._step.graph.nodes) + 1
        start, stop, end, done = (np.full(nodes, -1, dtype=np.int64) for _ in range(4))
        for part in parts:
            inside = slice(part.segment.start, part.segment.stop)
            start[inside], stop[inside] = part.segment.start, part.segment.stop
            end[inside] = part.read_end
            done[inside] = part.done
        ends: Ints = self._least_end.copy()
        at, node, last = self._readers.T
        within = stop[node] > last
        comes_in = within & (self._maker[at] < start[node])
        stays = within & ~comes_in
        wanted = np.where(within, np.maximum(end[node], done[node]), self._reader_ends)
        np.maximum.at(ends, at[~stays], wanted[~stays])
        if parts:
            np.maximum.at(ends, *_join([part.inner for part in parts]))
        outside = start[self._savers[:, 1]] < 0
        np.maximum.at(ends, self._savers[outside, 0], self._savers[outside, 2])
        return ends

    def _find_least_end(self, position: int) -> int:
        made = self._step.made[position]
        if made.is_output:
            return self._size
        return max(made.local_end, -1 if made.held_to is None else made.held_to)

    def _find_read_end(self, node: int) -> int:
        """How long a node's arguments are held for it: frames of the user's hold them anyway."""
        return -1 if self._step.keeps_frames else self._step.end_operation[node] - 1

    def _find_release(self, position: int, released: int | None) -> int:
        if released is not None:
            return released
        died = self._step.graph.storages[self._step.made[position].index].died
        return self._size if died is None else died

    def _measure_fixed(self) -> Ints:
        """What all other storages add, and what forward made from its birth on.

        First during each operation, then after it.
        """
        totals = np.zeros((2, self._size + 2), dtype=np.int64)
        for storage in self._step.graph.storages:
            born = 0 if storage.born == RESIDENT else storage.born
            totals[:, born] += storage.nbytes
            if storage.died is not None and storage.index not in self._step.makers:
                totals[0, storage.died + 1] -= storage.nbytes
                totals[1, max(storage.died, born)] -= storage.nbytes
        return totals

    # -- segments --------------------------------------------------------------------------------

    def _find_part(self, segment: SegmentRange) -> _Part:
        part = self._parts.get(segment)
        if part is None:
            part = self._parts[segment] = self._work_out(segment)
        return part

    def _work_out(self, segment: SegmentRange) -> _Part:
        step = self._step
        first, stop = step.first_operation[segment.start], step.end_operation[segment.stop - 1]
        runs = [*plan_recomputations(step, [segment])]
        every = [*iterate_recomputations(runs)]
        follow: dict[int, int] = {}
        for run in every:  # those before the same operation follow each other, parents first
            run.base = (run.trigger - 1) * _SPREAD + 1 + follow.get(run.trigger, 0)
            follow[run.trigger] = follow.get(run.trigger, 0) + run.size
        region_lives = SegmentIntervals(step, [segment], runs, self._places)
        lives = [*region_lives.iterate_recomputed()]
        inner = [
            (position, region_lives.find_forward_end(step.made[position]))
            for position in step.find_activations(first, stop)
        ]
        operations = (o for run in every for o in step.graph.operations[run.first : run.stop])
        return _Part(
            segment=segment,
            cost=float(sum(map(self._price, every))),
            done=runs[0].done if runs else -1,
            read_end=self._find_read_end(segment.stop - 1),
            changes=self._list_changes(lives),
            runs=self._measure_runs(every, lives),
            inner=_tabulate(inner),
            libraries=frozenset(name for o in operations for name in o.keeps),
        )

    def _price(self, run: Run) -> float:
        cost: float = self._costs[run.stop] - self._costs[run.first]
        for _, cast in run.casts:
            born = self._step.makers[cast].born
            cost += self._costs[born + 1] - self._costs[born]
        return cost

    def _list_changes(self, lives: Iterable[LiveInterval]) -> Ints:
        """Where what lives during operations changes, and what is alive after them."""
        changes: list[tuple[int, int]] = []
        for life in lives:
            first = -(-life.born // _SPREAD)
            nbytes = self._sizes[life.storage]
            for row in (0, 1):  # what dies at an operation is not alive after it
                last = self._size if life.died is None else (life.died - row) // _SPREAD
                if last >= first:
                    behind = row * (self._size + 2)
                    changes.append((behind + first, nbytes))
                    changes.append((behind + min(last, self._size) + 1, -nbytes))
        return _tabulate(changes)

    def _measure_runs(self, runs: Sequence[Run], lives: Sequence[LiveInterval]) -> Ints:
        """The most that each run holds above what is alive before it."""
        born = np.array([life.born for life in lives], dtype=np.int64)
        never = self._size * _SPREAD
        died = np.array(
            [never if life.died is None else life.died for life in lives], dtype=np.int64
        )
        nbytes = np.array([self._sizes[life.storage] for life in lives], dtype=np.int64)
        found = []
        for run in runs:
            size = run.size
            if not size:
                continue
            before = (run.trigger - 1) * _SPREAD
            first = np.maximum(born - run.base, 0)
            last = np.minimum(died - run.base, size - 1)
            is_here = (first < size) & (last >= first)
            deltas = np.zeros(size + 1, dtype=np.int64)
            np.add.at(deltas, first[is_here], nbytes[is_here])
            np.subtract.at(deltas, last[is_here] + 1, nbytes[is_here])
            alive_before = int(nbytes[(born <= before) & (died > before)].sum())
            live = np.cumsum(deltas)[:size] + self._workspaces[run.list_operations(self._step)]
            found.append((run.trigger, int(live.max()) - alive_before))
        return _tabulate(found)


def _tabulate(pairs: Sequence[tuple[int, int]]) -> Ints:
    """Pairs as two rows."""
    rows: Ints = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return rows


def _join(tables: Sequence[Ints]) -> Ints:
    return np.concatenate(tables, axis=1)

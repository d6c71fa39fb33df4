"""The peak and the cost of a plan, a hundred times faster than simulating its step.

A segment's addition to the step depends on nothing but the segment: when it runs again, the most
that its runs hold, and how long what they make lives on. That is worked out once for each segment,
by the code that simulates, and then only added up. What forward made lives until the latest of the
times that its readers and savers ask for, each of which depends on one segment or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.graph import RESIDENT, Phase
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.recomputation import (
    LiveInterval,
    Run,
    SegmentIntervals,
    SegmentRange,
    iterate_runs,
    plan_runs,
)

Ints = NDArray[np.int64]
_SPREAD = 1 << 24
"""Places between two operations of the recorded step, for what runs again there."""


@dataclass(frozen=True, slots=True)
class _SegmentScore:
    """A segment's addition to a step."""

    segment: SegmentRange
    cost: float
    # the operation after which the segment is not needed; -1 where backward needs nothing
    done: int
    read_end: int  # the operation to which forward holds what its nodes take from before it
    # operations, and the change of the live bytes during them and all later ones; behind all
    # operations, the same for what is still alive once they are over
    changes: Ints
    runs: Ints  # operations before which it runs again, and the most bytes that it then adds
    # the storages it makes, as positions in ``step.made``, and where its own frames free each
    # of them
    inner: Ints
    libraries: frozenset[str]


class Scorer:
    """Scores plans of one step, with a cost for each operation."""

    def __init__(self, step: StepIndex, costs: Sequence[float]) -> None:
        graph, made = step.graph, step.made
        self._step = step
        self._costs = np.array([0.0, *np.cumsum(costs)])
        self._size = size = len(graph.operations)
        self._places = [index * _SPREAD for index in range(size)]
        self._known: dict[SegmentRange, _SegmentScore] = {}
        self._workspaces = _to_array(operation.workspace_bytes for operation in graph.operations)
        self._taken = {
            name for o in graph.operations if o.phase is Phase.BACKWARD for name in o.keeps
        }
        self._library_bytes = {s.name: s.nbytes for s in graph.storages}
        self._sizes = [storage.nbytes for storage in graph.storages]
        # Live bytes during each operation, then after it: of storages that forward made from
        # their birth on, of all others to their death.
        self._fixed = np.zeros((2, size + 2), dtype=np.int64)
        for storage in graph.storages:
            born = 0 if storage.born == RESIDENT else storage.born
            self._fixed[:, born] += storage.nbytes
            if storage.died is not None and storage.index not in step.makers:
                self._fixed[0, storage.died + 1] -= storage.nbytes
                self._fixed[1, max(storage.died, born)] -= storage.nbytes
        self._nbytes = _to_array(m.nbytes for m in made)
        self._born = _to_array(m.born for m in made)
        self._maker = _to_array(m.node for m in made)
        self._least_end = _to_array(
            size if m.is_output else max(m.local_end, -1 if m.held_to is None else m.held_to)
            for m in made
        )
        self._readers = _to_rows(
            (
                (at, first, last, self._find_read_end(first))
                for at, m in enumerate(made)
                for first, last in (*((node, node) for node in m.readers), *m.consumers)
            ),
            4,
        )
        deaths = [graph.storages[m.index].died for m in made]
        self._savers = _to_rows(
            (
                (
                    at,
                    len(graph.nodes) if save.node is None else save.node,
                    next((end for end in (save.released, deaths[at]) if end is not None), size),
                )
                for at, m in enumerate(made)
                for save in m.saves
            ),
            3,
        )

    def score(self, segments: Iterable[SegmentRange]) -> tuple[int, float]:
        """Scores segments that lie apart and in order: the peak in bytes, and the cost."""
        scores = [self._score_segment(segment) for segment in segments]
        ends = self._find_ends(scores)
        totals = self._fixed.copy()
        np.subtract.at(totals[0], ends + 1, self._nbytes)
        np.subtract.at(totals[1], np.maximum(ends, self._born), self._nbytes)
        if scores:
            at, nbytes = np.concatenate([score.changes for score in scores], axis=1)
            np.add.at(totals.reshape(-1), at, nbytes)
        during, after = np.cumsum(totals, axis=1)
        peak = int((during[: self._size] + self._workspaces).max())
        if scores:
            triggers, most = np.concatenate([score.runs for score in scores], axis=1)
            peak = max(peak, int((after[triggers - 1] + most).max(initial=0)))
        libraries = frozenset().union(*(score.libraries for score in scores)) - self._taken
        peak += sum(self._library_bytes[name] for name in libraries)
        return peak, float(sum(score.cost for score in scores))

    def _find_ends(self, scores: Sequence[_SegmentScore]) -> Ints:
        """Finds the operation after which each storage that forward made is freed."""
        nodes = len(self._step.graph.nodes) + 1
        start, stop, end, done = (np.full(nodes, -1, dtype=np.int64) for _ in range(4))
        for score in scores:
            inside = slice(score.segment.start, score.segment.stop)
            start[inside], stop[inside] = score.segment.start, score.segment.stop
            end[inside] = score.read_end
            done[inside] = score.done
        ends: Ints = self._least_end.copy()
        at, node, last, read_end = self._readers
        within = stop[node] > last
        # What a segment makes itself is held by its own frames, below.
        counts = ~within | (self._maker[at] < start[node])
        wanted = np.where(within, np.maximum(end[node], done[node]), read_end)
        np.maximum.at(ends, at[counts], wanted[counts])
        if scores:
            np.maximum.at(ends, *np.concatenate([score.inner for score in scores], axis=1))
        at, node, released = self._savers
        outside = start[node] < 0
        np.maximum.at(ends, at[outside], released[outside])
        return ends

    def _find_read_end(self, node: int) -> int:
        """Finds how long a node's arguments are held for it: the user's frames hold them anyway."""
        return -1 if self._step.keeps_frames else self._step.end_operation[node] - 1

    def _score_segment(self, segment: SegmentRange) -> _SegmentScore:
        known = self._known.get(segment)
        if known is not None:
            return known
        step = self._step
        outermost = plan_runs(step, [segment])
        runs = [*iterate_runs(outermost)]
        follow: dict[int, int] = {}
        cost = 0.0
        for run in runs:  # those before the same operation follow each other, parents first
            run.base = (run.trigger - 1) * _SPREAD + 1 + follow.get(run.trigger, 0)
            follow[run.trigger] = follow.get(run.trigger, 0) + run.size
            casts = ((step.makers[cast].born, step.makers[cast].born + 1) for _, cast in run.casts)
            ranges = ((run.first, run.stop), *casts)
            cost += float(sum(self._costs[stop] - self._costs[first] for first, stop in ranges))
        intervals = SegmentIntervals(step, [segment], outermost, self._places)
        lives = [*intervals.iterate_recomputed()]
        first, stop = step.first_operation[segment.start], step.end_operation[segment.stop - 1]
        operations = (o for run in runs for o in step.graph.operations[run.first : run.stop])
        changes = []
        for life in lives:
            born, nbytes = -(-life.born // _SPREAD), self._sizes[life.storage]
            for row in (0, 1):  # what dies at an operation is not alive after it
                last = self._size if life.died is None else (life.died - row) // _SPREAD
                if last >= born:
                    behind, after = row * (self._size + 2), min(last, self._size) + 1
                    changes += [(behind + born, nbytes), (behind + after, -nbytes)]
        self._known[segment] = score = _SegmentScore(
            segment=segment,
            cost=cost,
            done=outermost[0].done if outermost else -1,
            read_end=self._find_read_end(segment.stop - 1),
            changes=_to_rows(changes, 2),
            runs=_to_rows(self._measure_runs(runs, lives), 2),
            inner=_to_rows(
                (
                    (at, intervals.find_frame_end(step.made[at]))
                    for at in step.find_activations(first, stop)
                ),
                2,
            ),
            libraries=frozenset(name for o in operations for name in o.keeps),
        )
        return score

    def _measure_runs(
        self, runs: Iterable[Run], lives: Sequence[LiveInterval]
    ) -> Iterator[tuple[int, int]]:
        """Measures the most that each run holds above what is alive before it."""
        never = self._size * _SPREAD
        born = _to_array(life.born for life in lives)
        died = _to_array(never if life.died is None else life.died for life in lives)
        nbytes = _to_array(self._sizes[life.storage] for life in lives)
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
            yield run.trigger, int(live.max()) - alive_before


def _to_array(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _to_rows(tuples: Iterable[tuple[int, ...]], width: int) -> Ints:
    """Transposes tuples to one row for each of their places."""
    rows: Ints = np.array([*tuples], dtype=np.int64).reshape(-1, width).T
    return rows

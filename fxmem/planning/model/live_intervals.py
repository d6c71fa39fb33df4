"""From when to when each storage of a rewritten step lives, and who holds it.

Forward keeps a tensor as long as the rewritten graph does, whose every value goes after its last
use, or as long as the user's code did where that is what runs; autograd keeps what nodes outside
of all segments save. What a segment saves when it runs again lives until its function's backward is
over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxmem.graph import RESIDENT, MemoryGraph, Phase
from fxmem.planning.model.index import Activation, StepIndex
from fxmem.planning.model.recomputation import Run, iterate_recomputations
from fxmem.planning.model.segments import SegmentRange, iterate_segments


@dataclass(frozen=True, slots=True)
class LiveInterval:
    """A storage of the rewritten step, in places of its operations."""

    storage: int
    born: int
    died: int | None


class SegmentIntervals:
    """From when to when each storage lives, in forward and each time it is computed again."""

    def __init__(
        self,
        step: StepIndex,
        segments: Sequence[SegmentRange],
        runs: Sequence[Run],
        places: Sequence[int],
    ) -> None:
        self._step = step
        self._runs = runs
        self._done = {run.segment.start: run.done for run in runs}
        self._places = places
        self._paths: list[tuple[SegmentRange, ...]] = [()] * len(step.graph.nodes)
        self._lay_paths(segments)

    def iterate(self) -> Iterator[LiveInterval]:
        for storage in self._step.graph.storages:
            made = self._step.makers.get(storage.index)
            if made is not None:
                yield self._live_in_forward(made)
                continue
            born = RESIDENT if storage.born == RESIDENT else self._places[storage.born]
            yield LiveInterval(storage.index, born, self._find_place(storage.died))
        yield from self.iterate_recomputed()
        for index in _find_libraries(self._step.graph, self._runs):
            yield LiveInterval(index, RESIDENT, None)

    def iterate_recomputed(self) -> Iterator[LiveInterval]:
        """What segments make when they run again, and what their checkpoints keep."""
        for run in iterate_recomputations(self._runs):
            for again in self._step.list_activations(run.first, run.stop):
                yield self._live_again(again, run)
            for born, index in run.iterate_casts():
                kept = self._find_saved_ends(self._step.makers[index], run)
                yield LiveInterval(index, born, max([run.end, *kept]))
            yield from self._live_beside(run)

    def find_forward_end(self, storage: Activation) -> int:
        """The operation after which forward's frames let go of a storage."""
        return self._find_local_end(storage, 0)

    def _lay_paths(self, segments: Sequence[SegmentRange]) -> None:
        for segment in segments:
            for node in range(segment.start, segment.stop):
                self._paths[node] = (*self._paths[node], segment)
            self._lay_paths(segment.children)

    def _find_place(self, operation: int | None) -> int | None:
        return None if operation is None else self._places[operation]

    def _live_in_forward(self, storage: Activation) -> LiveInterval:
        """Held by forward's frames, by autograd outside of segments, and as a segment's input."""
        born = self._places[storage.born]
        if storage.is_output:
            return LiveInterval(storage.index, born, None)
        ends = [self._find_local_end(storage, 0)]
        if storage.held_to is not None:
            ends.append(storage.held_to)
        for save in storage.saves:
            if save.node is None or not self._paths[save.node]:
                if save.released is None:
                    return LiveInterval(storage.index, born, self._find_place(self._died(storage)))
                ends.append(save.released)
        for node in (*storage.readers, *(first for first, _ in storage.consumers)):
            path = self._paths[node]
            if path and path[0].start in self._done and _is_input(storage, path[0]):
                ends.append(self._done[path[0].start])
        return LiveInterval(storage.index, born, self._places[max(ends)])

    def _live_again(self, storage: Activation, run: Run) -> LiveInterval:
        """Held by the run's frames, by what it saves, and as the input of a segment within."""
        if storage.is_output and storage.index not in self._step.graph.nodes[storage.node].results:
            # A module's hook puts it in the place of forward's, as it does a normalised weight.
            return LiveInterval(storage.index, run.place(storage.born), run.place(storage.born))
        end = run.place(self._find_local_end(storage, run.depth + 1, run))
        ends = [end, *self._find_saved_ends(storage, run)]
        if storage.fills_run:
            ends.append(run.end)
        for child in run.children:
            ends += self._find_input_ends(storage, child)
        return LiveInterval(storage.index, run.place(storage.born), max(ends))

    def _live_beside(self, run: Run) -> Iterator[LiveInterval]:
        """Copies of running statistics and states."""
        step, segment = self._step, run.segment
        end = run.end
        if run.stop > run.first:
            for node in range(segment.start, segment.stop):
                for index in step.statistics[node]:
                    kept = (self._places[returned] for returned in run.saved.get(index, ()))
                    yield LiveInterval(index, run.base, max([end, *kept]))
        born = self._places[step.first_operation[segment.start]]
        for index in self._list_states(segment):
            yield LiveInterval(index, born, self._places[run.done])
            if run.stop > run.first:
                kept = (self._places[returned] for returned in run.saved.get(index, ()))
                yield LiveInterval(index, run.base, max([end, *kept]))
        for inner in iterate_segments(segment.children):  # their checkpoints are made again
            first = step.first_operation[inner.start]
            if first < run.stop:
                for index in self._list_states(inner):
                    yield LiveInterval(index, run.place(first), end)

    def _list_states(self, segment: SegmentRange) -> list[int]:
        """The states that a checkpoint keeps copies of."""
        step = self._step
        nodes = range(segment.start, segment.stop)
        return [*dict.fromkeys(index for node in nodes for index in step.states[node])]

    def _find_saved_ends(self, storage: Activation, run: Run) -> Iterator[int]:
        for returned in run.saved.get(storage.index, ()):
            yield self._places[returned]

    def _find_input_ends(self, storage: Activation, run: Run) -> Iterator[int]:
        if _is_input(storage, run.segment):
            yield run.end
            yield from self._find_saved_ends(storage, run)
            for child in run.children:
                yield from self._find_input_ends(storage, child)

    def _find_local_end(self, storage: Activation, depth: int, run: Run | None = None) -> int:
        """The operation of forward after which the frames let go of a storage.

        A call of a segment holds its arguments until it returns, and what it returns too.
        """
        if run is not None and storage.is_output:
            return run.stop  # it is returned
        if self._step.keeps_frames:
            return storage.local_end
        end, path = storage.local_end, self._paths[storage.node][depth:]
        for node in storage.readers:
            if run is not None and node >= run.segment.stop:
                return run.stop  # it is returned
            unit = next(
                (
                    inner
                    for at, inner in enumerate(self._paths[node][depth:])
                    if at >= len(path) or path[at] is not inner
                ),
                None,
            )
            last = node if unit is None else unit.stop - 1
            end = max(end, self._step.end_operation[last] - 1)
        return end

    def _died(self, storage: Activation) -> int | None:
        return self._step.graph.storages[storage.index].died


def _find_libraries(graph: MemoryGraph, runs: Sequence[Run]) -> Iterator[int]:
    """What libraries take for backward's thread because forward's operators run there too."""
    taken = {name for o in graph.operations if o.phase is Phase.BACKWARD for name in o.keeps}
    for run in iterate_recomputations(runs):
        for operation in graph.operations[run.first : run.stop]:
            for name in operation.keeps:
                if name not in taken:
                    taken.add(name)
                    yield next(s.index for s in graph.storages if s.name == name)


def _is_input(storage: Activation, segment: SegmentRange) -> bool:
    return storage.node < segment.start and storage.comes_into(range(segment.start, segment.stop))

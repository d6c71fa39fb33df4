"""Segments, their runs in backward, and the live intervals of the storages of a rewritten step.

A segment runs again before backward unpacks the first tensor that the segment would have saved, up
to the last tensor that it saves: ``torch/utils/checkpoint.py``,
``_checkpoint_without_reentrant_generator`` with early stop.

Forward keeps a tensor as long as the rewritten graph does, whose every value goes after its last
use, or as long as the user's code did where that is what runs; autograd keeps what nodes outside
of all segments save. What a segment saves when it runs again lives until its function's backward is
over.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from fxmem.graph import RESIDENT, Phase
from fxmem.planning.model.index import Activation, StepIndex

_Segment = TypeVar("_Segment")
Span: TypeAlias = tuple[int, int]
"""Indices of a first node and of the node after the last."""


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Consecutive nodes under one checkpoint.

    >>> 3 in SegmentRange(0, 4, (SegmentRange(1, 3),)), 4 in SegmentRange(0, 4)
    (True, False)
    """

    start: int  # index of its first node
    stop: int  # index after that of its last
    # segments within it, apart and in order: what they hold is computed once more when backward
    # needs it
    children: tuple[SegmentRange, ...] = ()

    def __contains__(self, node: int | None) -> bool:
        """Returns whether a node lies in the segment, by its index."""
        return node is not None and self.start <= node < self.stop


Segments: TypeAlias = tuple[SegmentRange, ...]
"""All segments of a plan, or within one segment: apart from each other and in order."""


def iterate_segments(segments: Iterable[_Segment]) -> Iterator[_Segment]:
    """Iterates over all segments, of a search or of a plan, each before those within it."""
    for segment in segments:
        yield segment
        yield from iterate_segments(segment.children)  # type: ignore[attr-defined]


def nest_spans(spans: Iterable[Span]) -> Segments:
    """Makes segments of spans that lie apart or within each other.

    >>> nest_spans([(1, 3), (0, 4), (6, 8)])
    (SegmentRange(start=0, stop=4, children=(SegmentRange(start=1, stop=3, children=()),)), \
SegmentRange(start=6, stop=8, children=()))
    """
    ordered = sorted(set(spans), key=lambda span: (span[0], -span[1]))

    def nest(at: int, stop: int) -> tuple[Segments, int]:
        segments: list[SegmentRange] = []
        while at < len(ordered) and ordered[at][0] < stop:
            start, end = ordered[at]
            children, at = nest(at + 1, end)
            segments.append(SegmentRange(start, end, children))
        return tuple(segments), at

    return nest(0, sys.maxsize)[0]


@dataclass(slots=True)
class Run:
    """A recomputation of a segment."""

    segment: SegmentRange  # the segment
    depth: int  # the number of segments around it
    trigger: int  # the operation of backward before which it runs
    first: int  # the first operation of forward that runs
    stop: int  # the operation after the last
    done: int  # the operation of backward after which the segment is not needed
    # the operations of backward that end the saves of each storage that it keeps itself, and
    # not the segments within: an unpacked tensor is then its function's own (``unpack_hook``)
    saved: Mapping[int, Sequence[int]]
    # storages that autocast casts anew, each after the operation that first reads it
    casts: Sequence[tuple[int, int]]
    children: Sequence[Run]  # the runs of the segments within
    base: int = 0  # the place of its first operation in the rewritten step

    @property
    def size(self) -> int:
        """The number of operations that run."""
        return self.stop - self.first + len(self.casts)

    @property
    def end(self) -> int:
        """The place of its last operation."""
        return self.base + self.size - 1

    def place(self, operation: int) -> int:
        """Places an operation of forward, in the run or after its end."""
        operation = min(operation, self.stop - 1)
        casts = bisect_left(self.casts, (operation + 1,)) if self.casts else 0
        return self.base + operation - self.first + casts

    def list_operations(self, step: StepIndex) -> list[int]:
        """Lists the operations of forward that run, in order."""
        operations = [*range(self.first, self.stop)]
        for operation, storage in reversed(self.casts):
            operations.insert(operation - self.first, step.makers[storage].born)
        return operations


def plan_runs(step: StepIndex, segments: Iterable[SegmentRange], depth: int = 0) -> list[Run]:
    """Plans the runs of the segments that backward needs, each with those within."""
    runs = []
    for segment in segments:
        saves = [s for n in range(segment.start, segment.stop) for s in step.saves_by_node[n]]
        unpacked = [save.unpacked for save in saves if save.unpacked is not None]
        if not unpacked:
            continue
        own = [save for save in saves if not any(save.node in c for c in segment.children)]
        saved: dict[int, list[int]] = {}
        for save in own:
            if save.returned is not None:
                saved.setdefault(save.storage, []).append(save.returned)
        first = step.first_operation[segment.start]
        inputs = [step.first_operation[child.start] for child in segment.children]
        stop = max([first, *(save.position for save in own), *inputs])
        # A run begins with an empty cache of autocast's: ``torch.utils.checkpoint`` enters
        # autocast anew, and ``torch/amp/autocast_mode.py`` clears it when the outermost exits.
        anew: dict[int, int] = {}
        at, end = (bisect_left(step.casts, (operation,)) for operation in (first, stop))
        for operation, storage in step.casts[at:end]:
            if step.makers[storage].born < first:
                anew.setdefault(storage, operation)
        runs.append(
            Run(
                segment,
                depth,
                trigger=min(unpacked),
                first=first,
                stop=stop,
                done=max(save.released for save in saves if save.released is not None),
                saved=saved,
                casts=[(operation, storage) for storage, operation in anew.items()],
                children=plan_runs(step, segment.children, depth + 1),
            )
        )
    return runs


def iterate_runs(runs: Iterable[Run]) -> Iterator[Run]:
    """Iterates over all runs, each before the runs of the segments within."""
    for run in runs:
        yield run
        yield from iterate_runs(run.children)


@dataclass(frozen=True, slots=True)
class LiveInterval:
    """A storage of the rewritten step, in places of its operations."""

    storage: int
    born: int
    died: int | None


class SegmentIntervals:
    """The live intervals of storages, in forward and each time that they are recomputed.

    ``places`` are the positions of the step's operations in the rewritten step.
    """

    def __init__(
        self,
        step: StepIndex,
        segments: Sequence[SegmentRange],
        runs: Sequence[Run],
        places: Sequence[int],
    ) -> None:
        self._step = step
        self._runs = [*iterate_runs(runs)]
        self._done = {run.segment.start: run.done for run in runs}
        self._places = places
        # By node, the segments around it, outermost first.
        self._paths: list[tuple[SegmentRange, ...]] = [()] * len(step.graph.nodes)
        for segment in iterate_segments(segments):
            for node in range(segment.start, segment.stop):
                self._paths[node] = (*self._paths[node], segment)

    def iterate(self) -> Iterator[LiveInterval]:
        """Iterates over the intervals of all storages, and of what libraries take for backward."""
        graph, places = self._step.graph, self._places
        for storage in graph.storages:
            made = self._step.makers.get(storage.index)
            born = RESIDENT if storage.born == RESIDENT else places[storage.born]
            died = storage.died if made is None else self._find_forward_death(made)
            yield LiveInterval(storage.index, born, None if died is None else places[died])
        yield from self.iterate_recomputed()
        taken = {name for o in graph.operations if o.phase is Phase.BACKWARD for name in o.keeps}
        for run in self._runs:  # backward's thread runs forward's operators too
            for operation in graph.operations[run.first : run.stop]:
                for name in operation.keeps:
                    if name not in taken:
                        taken.add(name)
                        kept = next(s.index for s in graph.storages if s.name == name)
                        yield LiveInterval(kept, RESIDENT, None)

    def iterate_recomputed(self) -> Iterator[LiveInterval]:
        """Iterates over what segments make when they run again, and what their checkpoints keep."""
        step = self._step
        for run in self._runs:
            for made in step.list_activations(run.first, run.stop):
                born = run.place(made.born)
                if made.is_output and made.index not in step.graph.nodes[made.node].results:
                    # A module's hook puts it in the place of forward's, like a normalised weight.
                    yield LiveInterval(made.index, born, born)
                    continue
                ends = [
                    run.place(self.find_frame_end(made, run)),
                    *self._list_saved_ends(made.index, run),
                ]
                if made.fills_run:
                    ends.append(run.end)
                for child in run.children:
                    ends += self._list_input_ends(made, child)
                yield LiveInterval(made.index, born, max(ends))
            for number, (operation, index) in enumerate(run.casts):
                born = run.base + operation - run.first + number
                ends = [run.end, *self._list_saved_ends(index, run)]
                yield LiveInterval(index, born, max(ends))
            yield from self._iterate_copies(run)

    def find_frame_end(self, made: Activation, run: Run | None = None) -> int:
        """Finds the operation of forward after which the frames of forward, or of a run, free it.

        A call of a segment holds its arguments until it returns, and what it returns too.
        """
        if run is not None and made.is_output:
            return run.stop  # it is returned
        if self._step.keeps_frames:
            return made.local_end
        depth = 0 if run is None else run.depth + 1
        end, path = made.local_end, self._paths[made.node][depth:]
        for node in made.readers:
            if run is not None and node >= run.segment.stop:
                return run.stop  # it is returned
            call = next(
                (
                    segment
                    for at, segment in enumerate(self._paths[node][depth:])
                    if at >= len(path) or path[at] is not segment
                ),
                None,
            )
            end = max(end, self._step.end_operation[node if call is None else call.stop - 1] - 1)
        return end

    def _find_forward_death(self, made: Activation) -> int | None:
        """Finds the last holder: forward's frames, autograd, or a segment that takes it."""
        if made.is_output:
            return None
        ends = [self.find_frame_end(made)]
        if made.held_to is not None:
            ends.append(made.held_to)
        for save in made.saves:
            if save.node is None or not self._paths[save.node]:
                if save.released is None:
                    return self._step.graph.storages[made.index].died
                ends.append(save.released)
        for node in (*made.readers, *(first for first, _ in made.consumers)):
            path = self._paths[node]
            if path and path[0].start in self._done and _is_input(made, path[0]):
                ends.append(self._done[path[0].start])
        return max(ends)

    def _iterate_copies(self, run: Run) -> Iterator[LiveInterval]:
        """Iterates over a run's copies of running statistics and states."""
        step, segment = self._step, run.segment
        runs_again = run.stop > run.first
        for node in range(segment.start, segment.stop) if runs_again else ():
            for index in step.statistics[node]:
                yield self._copy(index, run)
        born = self._places[step.first_operation[segment.start]]
        for index in self._list_states(segment):
            yield LiveInterval(index, born, self._places[run.done])
            if runs_again:
                yield self._copy(index, run)
        for inner in iterate_segments(segment.children):  # their checkpoints are made again
            first = step.first_operation[inner.start]
            if first < run.stop:
                for index in self._list_states(inner):
                    yield LiveInterval(index, run.place(first), run.end)

    def _copy(self, storage: int, run: Run) -> LiveInterval:
        return LiveInterval(storage, run.base, max([run.end, *self._list_saved_ends(storage, run)]))

    def _list_states(self, segment: SegmentRange) -> list[int]:
        nodes = range(segment.start, segment.stop)
        return [*dict.fromkeys(index for node in nodes for index in self._step.states[node])]

    def _list_saved_ends(self, storage: int, run: Run) -> list[int]:
        return [self._places[returned] for returned in run.saved.get(storage, ())]

    def _list_input_ends(self, made: Activation, run: Run) -> Iterator[int]:
        if _is_input(made, run.segment):
            yield run.end
            yield from self._list_saved_ends(made.index, run)
            for child in run.children:
                yield from self._list_input_ends(made, child)


def _is_input(made: Activation, segment: SegmentRange) -> bool:
    """Returns whether an older storage is an input of a segment."""
    return made.node < segment.start and (
        any(node in segment for node in made.readers)
        or any(first in segment and last in segment for first, last in made.consumers)
    )

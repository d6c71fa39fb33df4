"""Recomputation of segments in backward: the operations that run again, and when.

A segment runs again before backward unpacks the first tensor that the segment would have saved, up
to the last tensor that it saves: ``torch/utils/checkpoint.py``,
``_checkpoint_without_reentrant_generator`` with early stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxmem.graph import Save
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.segments import SegmentRange


@dataclass(slots=True)
class Run:
    """A segment that is computed again."""

    segment: SegmentRange
    depth: int
    trigger: int  # before which operation of backward
    first: int  # the operations of forward that run
    stop: int
    done: int  # after which operation of backward nothing of the segment is needed
    saved: dict[int, list[int]]  # what it keeps itself, not the segments within, and how long
    casts: Sequence[tuple[int, int]] = ()  # what autocast casts anew, before which operation
    children: list[Run] = field(default_factory=list)
    base: int = 0  # where its first operation comes to stand

    @property
    def size(self) -> int:
        """How many operations run."""
        return self.stop - self.first + len(self.casts)

    @property
    def end(self) -> int:
        """Where its last operation comes to stand."""
        return self.base + self.size - 1

    def place(self, operation: int) -> int:
        """Where an operation of forward comes to stand, in it or after it was over."""
        operation = min(operation, self.stop - 1)
        casts = bisect_right(self.casts, operation, key=_get_operation) if self.casts else 0
        return self.base + operation - self.first + casts

    def iterate_casts(self) -> Iterator[tuple[int, int]]:
        """What autocast casts anew, each with where that comes to stand."""
        for number, (operation, storage) in enumerate(self.casts):
            yield self.base + operation - self.first + number, storage

    def list_operations(self, step: StepIndex) -> list[int]:
        """The operations of forward that run, in order."""
        operations = [*range(self.first, self.stop)]
        for operation, storage in reversed(self.casts):
            operations.insert(operation - self.first, step.makers[storage].born)
        return operations


def _get_operation(cast: tuple[int, int]) -> int:
    return cast[0]


def plan_recomputations(step: StepIndex, segments: Sequence[SegmentRange]) -> Iterator[Run]:
    """What runs again for some segments: those that backward needs, each with those within."""
    for segment in segments:
        yield from _plan_segment(step, segment, 0)


def _plan_segment(step: StepIndex, segment: SegmentRange, depth: int) -> Iterator[Run]:
    """The run of a segment, if backward needs it, and in it those of the segments within."""
    saves = [s for n in range(segment.start, segment.stop) for s in step.saves_by_node[n]]
    unpacked = [save.unpacked for save in saves if save.unpacked is not None]
    if not unpacked:
        return
    direct = [save for save in saves if not any(save.node in c for c in segment.children)]
    first = step.first_operation[segment.start]
    inputs = [step.first_operation[child.start] for child in segment.children]
    stop = max([first, *(save.position for save in direct), *inputs])
    yield Run(
        segment,
        depth,
        trigger=min(unpacked),
        first=first,
        stop=stop,
        casts=_find_casts(step, first, stop),
        done=max(save.released for save in saves if save.released is not None),
        saved=_group_returns(direct),
        children=[r for child in segment.children for r in _plan_segment(step, child, depth + 1)],
    )


def _find_casts(step: StepIndex, first: int, stop: int) -> list[tuple[int, int]]:
    """The casts of weights that forward found in autocast's cache; a run begins with an empty one.

    Source: ``_checkpoint_without_reentrant_generator`` enters autocast anew, and what
    ``torch/amp/autocast_mode.py`` does when the outermost one exits.
    """
    at = bisect_left(step.casts, first, key=_get_operation)
    end = bisect_left(step.casts, stop, key=_get_operation)
    anew: dict[int, int] = {}
    for operation, storage in step.casts[at:end]:
        if step.makers[storage].born < first:
            anew.setdefault(storage, operation)
    return [(operation, storage) for storage, operation in anew.items()]


def _group_returns(saves: Iterable[Save]) -> dict[int, list[int]]:
    """What was computed again is the function's own once it is taken out (``unpack_hook``)."""
    returned: dict[int, list[int]] = {}
    for save in saves:
        if save.returned is not None:
            returned.setdefault(save.storage, []).append(save.returned)
    return returned


def iterate_recomputations(runs: Sequence[Run]) -> Iterator[Run]:
    """All runs, each before those of the segments within."""
    for run in runs:
        yield run
        yield from iterate_recomputations(run.children)

"""Runs of segments in backward: the operations that run again, and when.

A segment runs again before backward unpacks the first tensor that the segment would have saved, up
to the last tensor that it saves: ``torch/utils/checkpoint.py``,
``_checkpoint_without_reentrant_generator`` with early stop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.segment_ranges import SegmentRange


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

"""What runs a second time in backward, and when.

Before backward takes out the first thing that a region would have saved, the region runs again, up
to the last thing that it saves: as ``torch/utils/checkpoint.py`` does,
``_checkpoint_without_reentrant_generator`` with early stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxmem.graph import Save
from fxmem.planning.facts import StepFacts
from fxmem.planning.regions import Region


@dataclass(slots=True)
class Run:
    """A region that is computed again."""

    region: Region
    depth: int
    trigger: int  # before which operation of backward
    first: int  # the operations of forward that run
    stop: int
    done: int  # after which operation of backward nothing of the region is needed
    saved: dict[int, list[int]]  # what it keeps itself, not the regions within, and how long
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

    def list_operations(self, facts: StepFacts) -> list[int]:
        """The operations of forward that run, in order."""
        operations = [*range(self.first, self.stop)]
        for operation, storage in reversed(self.casts):
            operations.insert(operation - self.first, facts.makers[storage].born)
        return operations


def _get_operation(cast: tuple[int, int]) -> int:
    return cast[0]


def plan_runs(facts: StepFacts, regions: Sequence[Region]) -> Iterator[Run]:
    """What runs again for some regions: those that backward needs, each with those within."""
    for region in regions:
        yield from _plan_region(facts, region, 0)


def _plan_region(facts: StepFacts, region: Region, depth: int) -> Iterator[Run]:
    """The run of a region, if backward needs it, and in it those of the regions within."""
    saves = [s for n in range(region.start, region.stop) for s in facts.saves_by_node[n]]
    unpacked = [save.unpacked for save in saves if save.unpacked is not None]
    if not unpacked:
        return
    direct = [save for save in saves if not any(save.node in c for c in region.children)]
    first = facts.first_operation[region.start]
    inputs = [facts.first_operation[child.start] for child in region.children]
    stop = max([first, *(save.position for save in direct), *inputs])
    yield Run(
        region,
        depth,
        trigger=min(unpacked),
        first=first,
        stop=stop,
        casts=_find_casts(facts, first, stop),
        done=max(save.released for save in saves if save.released is not None),
        saved=_group_returns(direct),
        children=[r for child in region.children for r in _plan_region(facts, child, depth + 1)],
    )


def _find_casts(facts: StepFacts, first: int, stop: int) -> list[tuple[int, int]]:
    """The casts of weights that forward found in autocast's cache; a run begins with an empty one.

    Source: ``_checkpoint_without_reentrant_generator`` enters autocast anew, and what
    ``torch/amp/autocast_mode.py`` does when the outermost one exits.
    """
    at = bisect_left(facts.casts, first, key=_get_operation)
    end = bisect_left(facts.casts, stop, key=_get_operation)
    anew: dict[int, int] = {}
    for operation, storage in facts.casts[at:end]:
        if facts.makers[storage].born < first:
            anew.setdefault(storage, operation)
    return [(operation, storage) for storage, operation in anew.items()]


def _group_returns(saves: Iterable[Save]) -> dict[int, list[int]]:
    """What was computed again is the function's own once it is taken out (``unpack_hook``)."""
    returned: dict[int, list[int]] = {}
    for save in saves:
        if save.returned is not None:
            returned.setdefault(save.storage, []).append(save.returned)
    return returned


def iterate_runs(runs: Sequence[Run]) -> Iterator[Run]:
    """All runs, each before those of the regions within."""
    for run in runs:
        yield run
        yield from iterate_runs(run.children)

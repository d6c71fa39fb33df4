"""The memory of a pipeline's ranks, as pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any

from fxmem.analysis import Analysis
from fxmem.report.blocks import Block
from fxmem.report.result import Result
from fxmem.setup import Setup

SCHEMA_VERSION = 1


class Work(str, Enum):
    """The work of a stage on a micro-batch, in the words of ``_ComputationType``."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class StageAction:
    """An action of a schedule."""

    work: Work
    stage: int
    microbatch: int


Actions = tuple[tuple[int, StageAction | None], ...]
"""Actions of a rank, each with the operation that begins it; None after the schedule."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A stage on its rank.

    Attributes:
        index: Its number in the pipeline.
        kept_bytes: What one micro-batch keeps from its forward to its backward.
        most_in_flight: The most micro-batches between the two at once.
        in_flight: Those at the rank's peak.
    """

    index: int
    kept_bytes: int
    most_in_flight: int
    in_flight: int


@dataclass(frozen=True, repr=False)
class RankMemory(Analysis):
    """The analysis of a rank's step, in the steady state.

    Attributes:
        rank: Its number in the pipeline.
        actions: What it does, in order.
    """

    rank: int = 0
    actions: Actions = ()

    @property
    def action(self) -> StageAction | None:
        """The action at the peak; None after the schedule: merging results, the optimizers."""
        return self.actions[self._peak_index][1]

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """The stages that it runs."""
        return tuple(self._measure_stages())

    @property
    def _peak_index(self) -> int:
        return bisect_right([start for start, _ in self.actions], self.peak.step) - 1

    def _measure_stages(self) -> Iterator[StageMemory]:
        spans = [range(start, end) for (start, _), (end, _) in pairwise(self.actions)]
        for stage in sorted({action.stage for _, action in self.actions if action}):
            counts, count, forward = list[int](), 0, range(0)
            for at, (_, action) in enumerate(self.actions):
                work = action.work if action and action.stage == stage else None
                if work is Work.FORWARD:
                    count, forward = count + 1, spans[at]
                counts.append(count)
                count -= work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
            kept_bytes = sum(  # by the last micro-batch: others may keep what all share
                storage.nbytes
                for storage in self.graph.storages
                if storage.born in forward and storage.died not in forward
            )
            yield StageMemory(stage, kept_bytes, max(counts), counts[self._peak_index])


@dataclass(frozen=True)
class Pipeline(Result):
    """The memory of each rank of a pipeline.

    Attributes:
        schedule: The name of the schedule.
        microbatches: Micro-batches of a step.
        ranks: The ranks, in order.
    """

    schedule: str
    microbatches: int
    ranks: tuple[RankMemory, ...]

    @property
    def setup(self) -> Setup:
        """The step of the first rank, as text."""
        return self.ranks[0].setup

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak; the first of equal ones."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank."""
        return self.fullest.peak_bytes

    def __repr__(self) -> str:
        peaks = [rank.peak_bytes for rank in self.ranks]
        return f"Pipeline(schedule={self.schedule!r}, peak_bytes={peaks})"

    def list_blocks(self) -> list[Block]:
        from fxmem.pipelines.text import list_pipeline_blocks

        return list_pipeline_blocks(self)

    def list_bars(self) -> Mapping[str, int | None]:
        return {f"rank {rank.rank}": rank.peak_bytes for rank in self.ranks}

    def to_dict(self) -> dict[str, Any]:
        """The figures, as plain dicts, lists, strings and integers: what :meth:`to_json` writes."""
        ranks = [
            {
                "rank": rank.rank,
                "peak_bytes": rank.peak_bytes,
                "reserved_bytes": rank.reserved_bytes,
                "fits": rank.fits,
                "action": rank.action and asdict(rank.action),
                "node": rank.peak.node and rank.peak.node.name,
                "source": rank.peak.source and asdict(rank.peak.source),
                "breakdown": dict(rank.breakdown),
                "stages": [asdict(stage) for stage in rank.stages],
            }
            for rank in self.ranks
        ]
        names = "model inputs gpu device optimizer loss mesh parallelize".split()
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self.setup, name) for name in names},
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "fullest": self.fullest.rank,
            "ranks": ranks,
        }

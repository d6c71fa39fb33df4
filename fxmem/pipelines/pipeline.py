"""The memory of a pipeline's ranks, as pure data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from fxmem.analysis import Setup, Shown
from fxmem.gpus import GpuModel
from fxmem.graph import Category
from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.allocator.replay import replay
from fxmem.pipelines.rank_replay import (
    Driver,
    RecordedStage,
    StageAction,
    Work,
    count_in_flight,
    replay_rank,
)

SCHEMA_VERSION = 1


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


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory in a steady step.

    Attributes:
        rank: Its number in the pipeline.
        peak_bytes: The most bytes allocated.
        reserved_bytes: The most that the allocator holds; the peak on the CPU.
        fits: Whether the step fits the GPU beside the largest CUDA context and NCCL's buffers;
            None without a GPU.
        action: What runs at the peak; None after the schedule: merging results, the optimizers.
        breakdown: Bytes by category at the peak; they sum to ``peak_bytes``.
        stages: The stages that it runs.
    """

    rank: int
    peak_bytes: int
    reserved_bytes: int
    fits: bool | None
    action: StageAction | None
    breakdown: Mapping[Category, int]
    stages: tuple[StageMemory, ...]


@dataclass(frozen=True)
class Pipeline(Shown):
    """The memory of each rank of a pipeline.

    Attributes:
        setup: The step, as text.
        schedule: The name of the schedule.
        microbatches: Micro-batches of a step.
        ranks: The ranks, in order.
    """

    setup: Setup
    schedule: str
    microbatches: int
    ranks: tuple[RankMemory, ...]

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

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain dicts, lists, strings and integers: what :meth:`to_json` writes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.setup.model,
            "inputs": list(self.setup.inputs),
            "gpu": self.setup.gpu,
            "device": self.setup.device,
            "optimizer": self.setup.optimizer,
            "loss": self.setup.loss,
            "mesh": self.setup.mesh,
            "parallelize": self.setup.parallelize,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "fullest": self.fullest.rank,
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def measure_rank(
    rank: int,
    actions: Sequence[StageAction],
    stages: Mapping[int, RecordedStage],
    driver: Driver,
    microbatches: int,
    settings: AllocatorSettings | None,
    gpu: GpuModel | None = None,
    context_bytes: int = 0,
) -> RankMemory:
    """Replays a rank, and finds its peak.

    Args:
        rank: Its number.
        actions: Its actions, in order.
        stages: Its stages, by index.
        driver: The code that runs the schedule.
        microbatches: Micro-batches of a step.
        settings: Those of the caching allocator; None where there is none.
        gpu: The target GPU; None for any.
        context_bytes: What is taken of it outside of the allocator.
    """
    replayed = replay_rank(actions, stages, driver, microbatches)
    events, live = replayed.events, [*accumulate(e.delta_bytes for e in replayed.events)]
    reserved: Sequence[int] = live
    fits = None
    if settings is not None:
        if gpu is not None:
            capacity = {"capacity_bytes": gpu.capacity_bytes, "context_bytes": context_bytes}
            fits = replay(events, settings, **capacity).shortage is None
        profile = replay(events, settings)
        live, reserved = [*profile.allocated_bytes], profile.reserved_bytes
    peak = max(range(replayed.start, len(events)), key=live.__getitem__)
    breakdown = Counter(dict.fromkeys(Category, 0))
    for at in range(peak + 1):
        breakdown[replayed.categories[at]] += live[at] - (live[at - 1] if at else 0)
    at = events[peak].step
    return RankMemory(
        rank,
        live[peak],
        max(reserved),
        fits,
        actions[at] if at < len(actions) else None,
        dict(breakdown),
        tuple(
            StageMemory(
                index,
                sum(c.nbytes for part in (w.during, w.after) for c in part),
                max(counts),
                counts[at],
            )
            for index, stage in stages.items()
            for w in [stage.later[Work.FORWARD]]
            for counts in [count_in_flight(actions, index)]
        ),
    )

"""Order of a pipeline schedule's actions, as ``torch.distributed.pipelining`` builds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from fxmem.errors import UsageError
from fxmem.pipelines.rank_replay import Driver, StageAction, Work

Order = tuple[tuple[StageAction, ...], ...]
"""The actions of each rank."""


def list_actions(
    schedule: str, stages: int, microbatches: int, ranks: int | None
) -> tuple[Driver, Order]:
    """Lists the actions of each rank, without sends and receives.

    Args:
        schedule: A name that ``get_schedule_class`` takes.
        stages: The number of stages.
        microbatches: Micro-batches of a step.
        ranks: The number of ranks. None for as many as stages, or half as many for a schedule of
            several stages a rank.

    Raises:
        UsageError: There is no such schedule, or it does not take these numbers.
    """
    for name, number in ("microbatches", microbatches), ("ranks", ranks):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be 1 or more, got {number}")
    try:
        kind: Any = get_schedule_class(schedule)
    except ValueError as error:
        raise UsageError(str(error).rstrip("."), hint="1F1B, GPipe, Interleaved1F1B, ...") from None
    is_single = issubclass(kind, PipelineScheduleSingle)
    ranks = ranks or (stages if is_single else stages // 2)
    count = f"{stages} stages on {ranks} ranks"
    if is_single and ranks != stages:
        raise UsageError(
            f"{schedule} takes one stage a rank, got {count}",
            hint="Interleaved1F1B, or another schedule of several stages a rank",
        )
    if stages % ranks or (not is_single and stages < 2 * ranks):
        raise UsageError(
            f"{schedule} takes the same number of stages, two or more, on each rank, got {count}",
            hint="change the split, or ranks",
        )
    if is_single and microbatches < stages and kind is not ScheduleGPipe:
        raise UsageError(
            f"{schedule} takes at least as many micro-batches as stages, got {microbatches}",
            hint=f"microbatches={stages}",
        )
    if is_single:
        is_gpipe = kind is ScheduleGPipe
        works = (
            _list_gpipe(microbatches) if is_gpipe else _list_1f1b(microbatches, stages - rank)
            for rank in range(ranks)
        )
        order = (
            tuple(StageAction(work, rank, microbatch) for work, microbatch in own)
            for rank, own in enumerate(works)
        )
        return (Driver.GPIPE if is_gpipe else Driver.ONE_F_ONE_B), tuple(order)
    own_stages = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=stages, submod=None)
        for _ in range(stages // ranks)
    ]
    try:
        built = kind(own_stages, microbatches)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{schedule} does not take {count}: {error}") from None
    driver = Driver.RUNTIME if issubclass(kind, _PipelineScheduleRuntime) else Driver.LOCKSTEP
    return driver, tuple(
        tuple(
            StageAction(
                Work[one.computation_type.name.removeprefix("FULL_")],
                one.stage_index,
                one.microbatch_index,
            )
            for action in built.pipeline_order[rank]
            if action is not None
            for one in getattr(action, "sub_actions", None) or (action,)
        )
        for rank in range(ranks)
    )


def _list_gpipe(microbatches: int) -> list[tuple[Work, int]]:
    """``ScheduleGPipe._step_microbatches``."""
    return [(work, n) for work in (Work.FORWARD, Work.BACKWARD) for n in range(microbatches)]


def _list_1f1b(microbatches: int, warmup: int) -> list[tuple[Work, int]]:
    """``Schedule1F1B._step_microbatches``, after ``warmup`` forwards a backward before each."""
    actions = [(Work.FORWARD, n) for n in range(min(warmup, microbatches))]
    for n in range(microbatches):
        actions.append((Work.BACKWARD, n))
        if n + warmup < microbatches:
            actions.append((Work.FORWARD, n + warmup))
    return actions

"""Schedules of a pipeline: the stages of each rank, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from fxmem.errors import UsageError


def deal_stages(
    schedule: str, stages: int, microbatches: int, ranks: int | None
) -> list[tuple[int, ...]]:
    """Lists the stages of each rank.

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
    own = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=stages,
            submod=None,
            stage_index_to_group_rank={at: at % ranks for at in range(stages)},
        )
        for _ in range(stages // ranks)
    ]
    try:
        built = build_schedule(schedule, own, microbatches, None)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{schedule} does not take {microbatches} micro-batches of {count}: {error}"
        ) from None
    if is_single:
        return [(rank,) for rank in range(ranks)]
    dealt: list[tuple[int, ...]] = []
    for rank in range(ranks):
        order = filter(None, built.pipeline_order[rank])
        parts = [getattr(action, "sub_actions", None) or (action,) for action in order]
        dealt.append(tuple(sorted({action.stage_index for each in parts for action in each})))
    return dealt


def build_schedule(
    schedule: str,
    stages: Sequence[Any],
    microbatches: int,
    compute_loss: Callable[[Any, Any], Any] | None,
) -> Any:
    """Builds PyTorch's schedule for the stages of one rank."""
    kind: Any = get_schedule_class(schedule)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else [*stages]
    return kind(given, microbatches, loss_fn=compute_loss)

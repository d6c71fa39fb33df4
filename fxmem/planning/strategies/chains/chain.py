"""A chain of stages, the schedules that run it in less memory, and what they need and cost.

The model is that of Beaumont, Herrmann et al., "Optimal checkpointing for heterogeneous chains"
(2019), with several options per stage as in Rockmate (Zhao et al., 2023). A schedule is what
nested ``torch.utils.checkpoint(use_reentrant=False)`` calls do, early stop included.

What is live, and when. Backward *stands* at stage ``p`` when the stages after ``p`` are done and
``p`` is next; ``held_bytes`` of stage ``p`` is then taken. All of forward stands at the last
stage. Running stages ``s..t`` has backward stand at ``t``, holds the input of ``s`` (which whoever
runs them holds already) and, where they are run again, the gradient of the output of ``t``. In
stage order,

- a kept stage runs with ``saved_bytes + forward_peak_bytes`` beside its input, and from then on
  ``saved_bytes`` stay until its backward;
- a segment runs its stages ``i`` with their input, output and ``forward_peak_bytes`` live, and from
  then on its input (held already) and the input of what follows it stay, that until the backward
  of what follows is done.

Then, from the last to the first, a kept stage runs its backward beside its input, with what it
saved, both gradients and ``backward_peak_bytes``; a segment is run again, by its own body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage so that its backward can follow."""

    # kept from its forward until its backward beside its input; with the input it holds all
    # of the output, whatever the next stage does
    saved_bytes: int
    cost: float = 0.0  # what is computed again inside its own backward; 0 where everything is kept
    forward_peak_bytes: int = 0  # what its forward holds above its input and ``saved_bytes``
    # what its backward holds above its input, ``saved_bytes`` and the gradients of both ends.
    # Less than 0 where much of ``saved_bytes`` is there for the next stage only, which is
    # done by then.
    backward_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a chain. Costs are seconds or FLOPs, the same for the whole chain."""

    input_bytes: int  # the storages that cross the boundary before it
    gradient_bytes: int  # the gradients of those
    cost: float  # of one forward
    options: tuple[StageOption, ...]  # the ways to run it so that its backward can follow
    # what a forward that keeps nothing holds above its input and output
    forward_peak_bytes: int = 0
    # what is taken, whatever the schedule, while backward stands at this stage: gradients of
    # parameters made by the stages after it, tensors that span many stages
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that run one after the other, each on what the one before it hands over."""

    stages: tuple[Stage, ...]  # in the order of forward
    output_bytes: int = 0  # what the last stage hands over; the loss
    gradient_bytes: int = 0  # the gradient of that, there from the end of forward

    @property
    def boundary_bytes(self) -> tuple[int, ...]:
        """Bytes that cross each boundary: the input of each stage, and the output."""
        return (*(stage.input_bytes for stage in self.stages), self.output_bytes)

    @property
    def boundary_gradient_bytes(self) -> tuple[int, ...]:
        """The gradients that cross each boundary in backward."""
        return (*(stage.gradient_bytes for stage in self.stages), self.gradient_bytes)


@dataclass(frozen=True, slots=True)
class Kept:
    """A stage that keeps what its backward needs, by one of its options."""

    stage: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Stages under one checkpoint: only their input is kept, and backward runs them again."""

    start: int  # the first stage
    stop: int  # the stage after the last
    body: Schedule  # how they are run when they are run again


Schedule: TypeAlias = tuple["Kept | Recomputed", ...]
"""Entries in the order of the stages; every stage is in exactly one."""


def measure_schedule(
    chain: Chain, schedule: Schedule, live_bytes: int | None = None
) -> tuple[int, float]:
    """Measures what running a chain by a schedule takes.

    Args:
        chain: The chain.
        schedule: Of all its stages, or the body of a segment.
        live_bytes: What is live around a body, its input included, ``held_bytes`` not.

    Returns:
        The most that is live, the chain's input and ``held_bytes`` included; and the cost of what
        is computed more than once: the first run of every stage is free.

    >>> keep = (StageOption(saved_bytes=10),)
    >>> chain = Chain((Stage(1, 1, cost=3.0, options=keep), Stage(1, 1, cost=5.0, options=keep)))
    >>> measure_schedule(chain, (Kept(0), Kept(1)))
    (22, 0.0)
    >>> measure_schedule(chain, (Recomputed(0, 1, (Kept(0),)), Kept(1)))
    (13, 3.0)
    """
    stages, sizes, gradients = chain.stages, chain.boundary_bytes, chain.boundary_gradient_bytes
    again = live_bytes is not None
    live = stages[0].input_bytes if live_bytes is None else live_bytes
    end = schedule[-1]
    stop = end.stage + 1 if isinstance(end, Kept) else end.stop
    around = stages[stop - 1].held_bytes + (gradients[stop] if again else 0)
    peak, cost = 0, 0.0
    taken: list[int] = []
    for entry in schedule:
        if isinstance(entry, Kept):
            option = stages[entry.stage].options[entry.option]
            peak = max(peak, around + live + option.saved_bytes + option.forward_peak_bytes)
            taken.append(option.saved_bytes)
            cost += option.cost + (stages[entry.stage].cost if again else 0)
        elif again and entry.stop == stop:
            # It is needed only once it is run for its own backward.
            taken.append(0)
        else:
            for i in range(entry.start, entry.stop):
                inputs = sizes[i] if i > entry.start else 0
                run_bytes = inputs + sizes[i + 1] + stages[i].forward_peak_bytes
                peak = max(peak, around + live + run_bytes)
                cost += stages[i].cost if again else 0
            taken.append(sizes[entry.stop] if entry.stop < stop else 0)
        live += taken[-1]
    for entry, size in zip(reversed(schedule), reversed(taken), strict=True):
        if isinstance(entry, Kept):
            stage = stages[entry.stage]
            edges = gradients[entry.stage] + gradients[entry.stage + 1]
            extra = stage.options[entry.option].backward_peak_bytes
            peak = max(peak, stage.held_bytes + live + edges + extra)
        live -= size
        if isinstance(entry, Recomputed):
            body = measure_schedule(chain, entry.body, live)
            peak, cost = max(peak, body[0]), cost + body[1]
    return peak, cost


def keep_stages(chain: Chain) -> Schedule:
    """Runs every stage once, by the cheapest and then smallest of its options.

    Nothing costs less.

    >>> options = (StageOption(4, cost=1.0), StageOption(9), StageOption(8))
    >>> keep_stages(Chain((Stage(0, 0, cost=2.0, options=options),)))
    (Kept(stage=0, option=2),)
    """
    found = (min((o.cost, o.saved_bytes, k) for k, o in enumerate(s.options)) for s in chain.stages)
    return tuple(Kept(index, option) for index, (_, _, option) in enumerate(found))

"""Replay of a pipeline's schedule over the recorded stages of one rank.

A micro-batch's allocations and frees are those of its recorded stage. Tensors that pass between
stages also live as long as the driver of the schedule refers to them, as
``torch/distributed/pipelining/schedules.py`` and ``stage.py`` do:

- A buffer for each input and each output gradient of each micro-batch is there all the time
  (``_setup_forward_recv_info``, ``_setup_backward_recv_info``). Between two stages of one rank, the
  result itself takes the buffer's place until the next step (``set_local_fwd_input``).
- ``ScheduleGPipe`` and ``_PipelineScheduleRuntime`` keep the handle of each send, and with it the
  tensor, to the end of the schedule.
- ``PipelineScheduleMulti`` waits for each send, and keeps what its variable ``output`` names.
- ``Schedule1F1B`` keeps what its variables name: ``output``, ``bwd_sends`` and ``send_work``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fxmem.graph import Category, Phase
from fxmem.memory.timeline import Action, Event


class Work(str, Enum):
    """A stage's work, in the words of ``_ComputationType``, and its optimizer's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    REDUCE_GRAD = "R"  # once for all micro-batches
    OPTIMIZER = "O"


class Driver(str, Enum):
    """The code that runs a schedule, which decides how long sent tensors live."""

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    RUNTIME = "runtime"
    LOCKSTEP = "lockstep"  # the schedules of several stages a rank up to torch 2.8


@dataclass(frozen=True, slots=True)
class StageAction:
    """An action of a schedule."""

    work: Work
    stage: int
    microbatch: int


_ENDS = (Work.BACKWARD, Work.BACKWARD_WEIGHT)  # which add up gradients, and end a micro-batch
Slot = tuple[Work, int]
"""A storage of a micro-batch: the work that allocates it, and its number there."""


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation or a free."""

    slot: Slot | None  # None for the workspace of a kernel
    nbytes: int  # negative where it is freed
    category: Category
    block: int = 0  # which of the kernel's blocks a workspace is
    stream: int = 0
    is_shared: bool = False  # with the other micro-batches, as parameters that a shard gathers


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """The allocations and frees of a work on one micro-batch, in order."""

    during: tuple[Change, ...]  # until it returns
    after: tuple[Change, ...] = ()  # once the driver refers to what it returned, with the loss
    returned: tuple[Slot, ...] = ()  # the result of a forward, the input gradients of a backward


@dataclass(frozen=True, slots=True)
class RecordedStage:
    """A stage's memory, recorded with one micro-batch at a time.

    Attributes:
        is_last: Whether it is the last stage, which has the loss.
        resident: What is there all the time: name, category and bytes.
        first: Each work on the first micro-batch, which makes the gradients.
        later: Each work on all others, and the optimizer's step.
        input_buffers: Bytes of the buffers that receive one micro-batch; none in the first stage.
        gradient_buffers: Those that receive the gradients of its result; none in the last stage.
        merged: Bytes of the results of all micro-batches, as ``step`` returns them, if it does.
    """

    is_last: bool
    resident: tuple[tuple[str, Category, int], ...]
    first: Mapping[Work, RecordedWork]
    later: Mapping[Work, RecordedWork]
    input_buffers: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    merged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReplay:
    """The events of a rank: what is there before, and two steps.

    Attributes:
        events: All allocations and frees. ``step`` is the number of the action; the optimizers' is
            that after the last.
        categories: Category of each event.
        start: Number of events before the second step, which is steady.
    """

    events: tuple[Event, ...]
    categories: tuple[Category, ...]
    start: int


def replay_rank(
    actions: Sequence[StageAction],
    stages: Mapping[int, RecordedStage],
    driver: Driver,
    microbatches: int,
) -> RankReplay:
    """Replays two steps of a rank.

    Args:
        actions: Those of the rank, in order.
        stages: Its stages, by index.
        driver: The code that runs the schedule.
        microbatches: Micro-batches of a step.
    """
    rank = _Rank(stages, driver)
    rank.allocate_residents(microbatches)
    rank.run_step(actions)
    start = len(rank.events)
    rank.run_step(actions)
    return RankReplay(tuple(rank.events), tuple(rank.categories), start)


def count_in_flight(actions: Iterable[StageAction], stage: int) -> tuple[int, ...]:
    """Counts the micro-batches of a stage that are under way during each action and at the end.

    A micro-batch is under way from its forward to the end of its backward.
    """
    count, counts = 0, []
    for action in actions:
        is_own = action.stage == stage
        count += is_own and action.work is Work.FORWARD
        counts.append(count)
        count -= is_own and action.work in _ENDS
    return (*counts, count)


class _Rank:
    """The storages of a rank, with the number of references to each."""

    def __init__(self, stages: Mapping[int, RecordedStage], driver: Driver) -> None:
        self.events: list[Event] = []
        self.categories: list[Category] = []
        self._stages, self._driver = stages, driver
        self._at, self._phase = 0, Phase.FORWARD
        self._storages: list[tuple[int, Category, int]] = []
        self._references: list[int] = []
        self._slots: dict[tuple[int, int, Slot], int] = {}  # until recorded work frees them
        self._buffers: dict[Hashable, list[int]] = {}
        self._variables: dict[Hashable, list[int]] = {}  # of the driver

    def allocate_residents(self, microbatches: int) -> None:
        """Allocates what is there all the time, workspaces of libraries once for all stages."""
        shared: Counter[str] = Counter()
        for index, stage in self._stages.items():
            libraries: Counter[str] = Counter()  # each has memory of its own for some threads
            for name, category, nbytes in stage.resident:
                if category is Category.WORKSPACE:
                    libraries[name] += nbytes
                else:
                    self._allocate(nbytes, category)
            shared |= libraries
            for kind, sizes, category in (
                ("input", stage.input_buffers, Category.INPUT),
                ("gradient", stage.gradient_buffers, Category.GRADIENT),
            ):
                for microbatch in range(microbatches):
                    made = [self._allocate(nbytes, category) for nbytes in sizes]
                    self._buffers[kind, index, microbatch] = made
        for nbytes in shared.values():
            self._allocate(nbytes, Category.WORKSPACE)

    def run_step(self, actions: Sequence[StageAction]) -> None:
        """Frees what the step before has left, and runs the schedule and the optimizers."""
        self._at, self._phase = 0, Phase.FORWARD
        for storage in self._slots.values():
            self._release(storage)
        self._slots.clear()
        works = [action.work for action in actions]
        warmup = next((at for at, work in enumerate(works) if work is not Work.FORWARD), 0)
        left = Counter(action.stage for action in actions if action.work in _ENDS)
        begun: set[tuple[int, Work]] = set()
        for self._at, action in enumerate(actions):
            stage = self._stages[action.stage]
            # Gradients are made by the first work of either kind.
            kind = action.stage, Work.BACKWARD if action.work in _ENDS else action.work
            work = (stage.later if kind in begun else stage.first)[action.work]
            begun.add(kind)
            is_forward = action.work is Work.FORWARD
            self._phase = Phase.FORWARD if is_forward else Phase.BACKWARD
            index, microbatch = action.stage, action.microbatch
            self._change(index, microbatch, work.during)
            returned = [self._slots[index, microbatch, slot] for slot in work.returned]
            if is_forward:
                self._pass_output(action, returned, is_fired=self._at < warmup - 1)
            elif returned or self._driver is Driver.ONE_F_ONE_B:
                is_fired = Work.FORWARD not in works[self._at :]
                self._pass_gradient(action, returned, is_fired=is_fired)
            self._change(index, microbatch, work.after)
            left[action.stage] -= action.work in _ENDS
            if self._driver is Driver.RUNTIME and not left[action.stage]:
                self._change(index, -1, stage.later[Work.REDUCE_GRAD].during)
        for index, stage in self._stages.items():
            if self._driver is not Driver.RUNTIME:
                self._change(index, -1, stage.later[Work.REDUCE_GRAD].during)
        self._at, self._phase = len(actions), Phase.OPTIMIZER
        for name in self._variables:
            self._refer(self._variables, name, [])
        for index, stage in self._stages.items():
            for at, nbytes in enumerate(stage.merged):
                merged = Change((Work.FORWARD, at), nbytes, Category.OUTPUT)
                self._change(index, len(actions), [merged])  # of no micro-batch
        for index, stage in self._stages.items():
            self._change(index, -1, stage.later[Work.OPTIMIZER].during)

    def _pass_output(self, action: StageAction, output: list[int], *, is_fired: bool) -> None:
        """Refers to a result as the driver does after a forward."""
        index, microbatch = action.stage, action.microbatch
        if self._driver is not Driver.RUNTIME:
            self._refer(self._variables, "output", output)
        if self._stages[index].is_last or self._driver is Driver.LOCKSTEP:
            return
        if index + 1 in self._stages:
            self._refer(self._buffers, ("input", index + 1, microbatch), output)
        elif self._driver is not Driver.ONE_F_ONE_B:
            self._refer(self._variables, action, output)
        elif is_fired:
            self._refer(self._variables, "send_work", output)

    def _pass_gradient(self, action: StageAction, gradients: list[int], *, is_fired: bool) -> None:
        """Refers to the gradients of the inputs as the driver does after a backward."""
        index, microbatch = action.stage, action.microbatch
        if self._driver is Driver.LOCKSTEP:
            return
        if index - 1 in self._stages:
            self._refer(self._buffers, ("gradient", index - 1, microbatch), gradients)
        elif self._driver is not Driver.ONE_F_ONE_B:
            self._refer(self._variables, action, gradients)
        else:
            self._refer(self._variables, "bwd_sends", gradients)
            if is_fired:
                self._refer(self._variables, "send_work", gradients)

    def _change(self, stage: int, microbatch: int, changes: Iterable[Change]) -> None:
        blocks: dict[int, int] = {}
        for change in changes:
            owner = -1 if change.is_shared else microbatch
            key = None if change.slot is None else (stage, owner, change.slot)
            if change.nbytes > 0:
                storage = self._allocate(change.nbytes, change.category, change.stream)
                if key is None:
                    blocks[change.block] = storage
                else:
                    self._slots[key] = storage
            else:
                self._release(blocks.pop(change.block) if key is None else self._slots.pop(key))

    def _refer(self, names: dict[Hashable, list[int]], name: Hashable, storages: list[int]) -> None:
        """Has a name refer to storages, and no more to those before."""
        for storage in storages:
            self._references[storage] += 1
        for storage in names.get(name, ()):
            self._release(storage)
        names[name] = storages

    def _allocate(self, nbytes: int, category: Category, stream: int = 0) -> int:
        self._storages.append((nbytes, category, stream))
        self._references.append(1)
        self._add(Action.ALLOC, len(self._storages) - 1)
        return len(self._storages) - 1

    def _release(self, storage: int) -> None:
        self._references[storage] -= 1
        if not self._references[storage]:
            self._add(Action.FREE, storage)

    def _add(self, action: Action, storage: int) -> None:
        nbytes, category, stream = self._storages[storage]
        event = Event(action, nbytes, storage, self._at, self._phase, stream=stream)
        self.events.append(event)
        self.categories.append(category)

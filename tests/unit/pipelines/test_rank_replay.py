"""A replayed rank against objects that PyTorch's drivers, written out, hold and let go."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from fxmem.graph import Category
from fxmem.memory.timeline import Action
from fxmem.pipelines.orders import list_actions
from fxmem.pipelines.rank_replay import (
    Change,
    Driver,
    RecordedStage,
    RecordedWork,
    StageAction,
    Work,
    count_in_flight,
    replay_rank,
)

F, B, W = Work.FORWARD, Work.BACKWARD, Work.BACKWARD_WEIGHT
ENDS = {Work.REDUCE_GRAD: RecordedWork(()), Work.OPTIMIZER: RecordedWork(())}
PARAMETER, SAVED, SENT, GRADIENT, SCRATCH = 1000, 100, 10, 1, 5000
"""Bytes of a parameter and of its gradient, and of a stage's other tensors."""


def make_stage(index: int, stages: int) -> RecordedStage:
    """A stage that saves one tensor, and runs one kernel with scratch memory in its backward."""
    saved, sent = ((F, 0), SAVED + index), ((F, 1), SENT + index)
    forward = RecordedWork(tuple(_make(*each) for each in (saved, sent)), returned=((F, 1),))
    first, later = {F: forward}, {F: forward, **ENDS}
    scratch = Change(None, SCRATCH, Category.WORKSPACE)
    freed = tuple(_make(slot, -nbytes) for slot, nbytes in (saved, sent))
    for works, gradient in ((first, ()), (later, (_make((B, 0), -PARAMETER),))):
        made = _make((B, 0), PARAMETER)
        own = [] if index == 0 else [_make((B, 1), GRADIENT + index)]
        end = _make((B, 1), -GRADIENT - index)
        during = (
            scratch,
            Change(None, -SCRATCH, Category.WORKSPACE),
            made,
            *own,
            *gradient,
            *freed,
        )
        returned = ((B, 1),) if own else ()
        works[B] = RecordedWork(during, (end,) if own else (), returned)
    return RecordedStage(
        is_last=index == stages - 1,
        resident=(("weight", Category.PARAMETER, PARAMETER),),
        first=first,
        later=later,
        input_buffers=(SENT + index - 1,) if index else (),
        gradient_buffers=(GRADIENT + index + 1,) if index < stages - 1 else (),
    )


def _make(slot: Any, nbytes: int) -> Change:
    return Change(slot, nbytes, Category.ACTIVATION)


class Memory:
    """Counts the bytes of objects that are referred to."""

    def __init__(self) -> None:
        self.live = 0
        self.seen: list[int] = []  # after each allocation

    def make(self, nbytes: int) -> Block:
        return Block(self, nbytes)


class Block:
    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        memory.live += nbytes
        memory.seen.append(memory.live)

    def __del__(self) -> None:
        self.memory.live -= self.nbytes


class Stage:
    """What ``_PipelineStageBase`` holds."""

    def __init__(self, memory: Memory, index: int, stages: int, microbatches: int) -> None:
        self.memory, self.index, self.is_last = memory, index, index == stages - 1
        self.weight, self.gradient = memory.make(PARAMETER), None
        self.cache: dict[int, Any] = {}
        sizes = {"input": index and SENT + index - 1, "gradient": GRADIENT + index + 1}
        if self.is_last:
            del sizes["gradient"]
        self.buffers = {
            (kind, n): memory.make(nbytes)
            for kind, nbytes in sizes.items()
            if nbytes
            for n in range(microbatches)
        }

    def forward(self, n: int) -> Block:
        saved = self.memory.make(SAVED + self.index)
        output = self.memory.make(SENT + self.index)
        self.cache[n] = saved, output
        return output

    def backward(self, n: int) -> Block | None:
        held = self.cache.pop(n)
        self.memory.make(SCRATCH)
        made = self.memory.make(PARAMETER)
        passed = self.memory.make(GRADIENT + self.index) if self.index else None
        self.gradient = self.gradient or made
        del held, made
        return passed


def run_1f1b(stage: Stage, stages: int, microbatches: int) -> None:
    """``Schedule1F1B._step_microbatches``, without its waits."""
    sends = not stage.is_last
    warmup, n, m = min(microbatches, stages - stage.index), 0, 0
    send_work: Any = None
    fwd_sends: Any = None
    bwd_sends: Any = None
    for _ in range(warmup):
        output = stage.forward(n)
        fwd_sends = output if sends else None
        if n != warmup - 1:
            send_work = fwd_sends
        n += 1
    while True:
        bwd_sends = stage.backward(m)
        m += 1
        if n == microbatches:
            break
        output = stage.forward(n)
        fwd_sends = output if sends else None
        n += 1
    send_work = bwd_sends
    while m < microbatches:
        bwd_sends = stage.backward(m)
        send_work = bwd_sends
        m += 1
    del output, send_work, fwd_sends, bwd_sends


def run_works(stages: dict[int, Stage], actions: tuple[StageAction, ...]) -> None:
    """``ScheduleGPipe._step_microbatches``, and ``_PipelineScheduleRuntime``'s."""
    works = []
    for action in actions:
        stage, n = stages[action.stage], action.microbatch
        passed = stage.forward(n) if action.work is F else stage.backward(n)
        kind, other = ("input", 1) if action.work is F else ("gradient", -1)
        neighbour = stages.get(action.stage + other)
        if neighbour is not None:
            neighbour.buffers[kind, n] = passed  # type: ignore[assignment]
        elif not (action.work is F and stage.is_last):
            works.append(passed)
        del passed


def run_lockstep(stages: dict[int, Stage], actions: tuple[StageAction, ...]) -> None:
    """``PipelineScheduleMulti._step_microbatches``, of torch up to 2.8."""
    output = None
    for action in actions:
        stage, n = stages[action.stage], action.microbatch
        if action.work is F:
            output = stage.forward(n)
        else:
            stage.backward(n)
    del output


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "microbatches"),
    [
        ("1F1B", 4, 4, 4),
        ("1F1B", 3, 3, 7),
        ("GPipe", 3, 3, 4),
        ("Interleaved1F1B", 2, 6, 4),
        ("LoopedBFS", 2, 4, 3),
    ],
)
def test_replay(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    driver, order = list_actions(schedule, stages, microbatches, ranks)
    for actions in order:
        own = sorted({action.stage for action in actions})
        check(actions, own, driver, stages, microbatches)


def test_lockstep() -> None:
    for actions in list_actions("Interleaved1F1B", 6, 4, 2)[1]:
        check(actions, sorted({a.stage for a in actions}), Driver.LOCKSTEP, 6, 4)


def test_neighbours_on_one_rank() -> None:
    order = [(F, 0), (F, 1), (B, 1), (B, 0)]
    actions = tuple(StageAction(w, s, n) for n in range(3) for w, s in order)
    check(actions, [0, 1], Driver.RUNTIME, 2, 3)


def check(
    actions: tuple[StageAction, ...], own: list[int], driver: Driver, stages: int, microbatches: int
) -> None:
    recorded = {index: make_stage(index, stages) for index in own}
    replayed = replay_rank(actions, recorded, driver, microbatches)
    live = [*accumulate(event.delta_bytes for event in replayed.events)]
    events = zip(live[replayed.start :], replayed.events[replayed.start :], strict=True)
    found = [nbytes for nbytes, event in events if event.action is Action.ALLOC]
    memory = Memory()
    real = {index: Stage(memory, index, stages, microbatches) for index in own}
    for _ in range(2):
        for stage in real.values():
            stage.gradient = None
        memory.seen.clear()
        if driver is Driver.ONE_F_ONE_B:
            run_1f1b(real[own[0]], stages, microbatches)
        else:
            (run_lockstep if driver is Driver.LOCKSTEP else run_works)(real, actions)
    assert (found, live[-1]) == (memory.seen, memory.live)


def test_gradients_are_made_by_the_first_work_on_weights() -> None:
    """DualPipeV runs some backwards as a whole, and some in two parts."""
    made = RecordedWork((_make((W, 0), 7),))
    temporary = RecordedWork((_make((W, 0), 7), _make((W, 0), -7)))
    none = RecordedWork(())
    first = {F: none, Work.BACKWARD_INPUT: none, B: made, W: made}
    later = {F: none, Work.BACKWARD_INPUT: none, B: temporary, W: temporary, **ENDS}
    stage = RecordedStage(True, (), first, later, (), ())
    works = [(F, 0), (B, 0), (F, 1), (Work.BACKWARD_INPUT, 1), (W, 1)]
    actions = [StageAction(work, 0, n) for work, n in works]
    replayed = replay_rank(actions, {0: stage}, Driver.RUNTIME, 2)
    assert sum(event.delta_bytes for event in replayed.events) == 7
    assert count_in_flight(actions, 0) == (1, 1, 1, 1, 1, 0)

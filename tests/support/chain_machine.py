"""A machine that runs schedules of a chain tensor by tensor, and all schedules of a chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fxmem.planning.strategies.chain import Chain, Kept, Recomputed, Schedule

Entry = Kept | Recomputed


@dataclass
class ChainMachine:
    """Runs a step; knows what is live, where backward stands and what has run before."""

    chain: Chain
    live: dict[tuple[str, int], int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    stands_at: int = 0
    peak_bytes: int = 0
    cost: float = 0.0

    def run_step(self, schedule: Schedule) -> None:
        """Forward, then backward; leaves only the gradient of the input."""
        count = len(self.chain.stages)
        self.stands_at = count - 1
        self.live["input", 0] = self._size_boundary(0)
        self._run_forward(schedule, is_rerun=False)
        self.live["gradient", count] = self.chain.gradient_bytes
        self._run_backward(schedule)
        assert self.live == {("gradient", 0): self.chain.stages[0].gradient_bytes}
        assert self.ran == set(range(count))

    def _size_boundary(self, index: int) -> int:
        stages = self.chain.stages
        return stages[index].input_bytes if index < len(stages) else self.chain.output_bytes

    def _observe(self, transient: int) -> None:
        held = self.chain.stages[self.stands_at].held_bytes
        self.peak_bytes = max(self.peak_bytes, held + sum(self.live.values()) + transient)

    def _pay(self, stage: int) -> None:
        if stage in self.ran:
            self.cost += self.chain.stages[stage].cost
        self.ran.add(stage)

    def _run_forward(self, entries: Schedule, is_rerun: bool) -> None:
        for entry in entries:
            is_end = entry is entries[-1]
            if isinstance(entry, Kept):
                self._run_and_keep(entry)
            elif not (is_end and is_rerun):
                self._run_and_drop(entry, is_end)

    def _run_and_keep(self, entry: Kept) -> None:
        option = self.chain.stages[entry.stage].options[entry.option]
        assert ("input", entry.stage) in self.live
        self.live["saved", entry.stage] = option.saved_bytes
        self._observe(option.forward_peak_bytes)
        # The output is part of what is saved.
        self.live["input", entry.stage + 1] = 0
        self._pay(entry.stage)
        self.cost += option.cost

    def _run_and_drop(self, entry: Recomputed, is_end: bool) -> None:
        assert ("input", entry.start) in self.live
        for stage in range(entry.start, entry.stop):
            self.live["input", stage + 1] = self._size_boundary(stage + 1)
            self._observe(self.chain.stages[stage].forward_peak_bytes)
            if stage != entry.start:
                del self.live["input", stage]
            self._pay(stage)
        if is_end:
            del self.live["input", entry.stop]

    def _run_backward(self, entries: Schedule) -> None:
        for entry in reversed(entries):
            if isinstance(entry, Recomputed):
                self._run_forward(entry.body, is_rerun=True)
                self._run_backward(entry.body)
            else:
                self._run_stage_backward(entry)

    def _run_stage_backward(self, entry: Kept) -> None:
        stage = self.chain.stages[entry.stage]
        assert self.stands_at == entry.stage
        # Whether this stage or the next held it, nothing needs the output any more.
        assert self.live.pop(("input", entry.stage + 1), 0) == 0
        self.live["gradient", entry.stage] = stage.gradient_bytes
        self._observe(stage.options[entry.option].backward_peak_bytes)
        del self.live["gradient", entry.stage + 1]
        del self.live["saved", entry.stage]
        del self.live["input", entry.stage]
        self.stands_at -= 1


def replay_schedule(chain: Chain, schedule: Schedule) -> tuple[int, float]:
    """The peak in bytes and the cost of what runs more than once."""
    machine = ChainMachine(chain)
    machine.run_step(schedule)
    return machine.peak_bytes, machine.cost


def list_schedules(chain: Chain) -> list[Schedule]:
    """All ways to nest regions in a chain."""
    return list(_list_runs(chain, 0, len(chain.stages), whole=True))


def _list_runs(chain: Chain, start: int, stop: int, whole: bool) -> Iterator[Schedule]:
    """All runs of some stages; ``whole`` where one region may hold all of them.

    A body that is one region again is the same as that region's body, without end.
    """
    if start == stop:
        yield ()
        return
    firsts: list[tuple[Entry, int]] = [
        (Kept(start, k), start + 1) for k in range(len(chain.stages[start].options))
    ]
    for end in range(start + 1, stop + (1 if whole else 0)):
        bodies = _list_runs(chain, start, end, whole=False)
        firsts += [(Recomputed(start, end, body), end) for body in bodies]
    for first, end in firsts:
        for rest in _list_runs(chain, end, stop, whole=True):
            yield (first, *rest)

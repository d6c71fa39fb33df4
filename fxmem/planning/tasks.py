"""Tasks that make and take values, what comes before what, and what an order of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Task:
    """Something that runs at once.

    Attributes:
        after: Those that have to be done before it.
        rise_bytes: The most that it holds itself while it runs, what it makes included.
        makes: The values that it leaves.
        takes: The values of others that it holds while it runs.
    """

    after: frozenset[int] = frozenset()
    rise_bytes: int = 0
    makes: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Tasks in the order in which they are written, which is one that they may run in.

    Attributes:
        tasks: The tasks.
        sizes: By value, its bytes. It goes when all tasks that take it are done.
        kept: The values that do not go.
    """

    tasks: tuple[Task, ...]
    sizes: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()


def measure_order(program: Program, order: Sequence[int]) -> tuple[int, ...]:
    """The most bytes that are alive while each task of an order runs.

    Args:
        program: The tasks.
        order: All of them.

    >>> program = Program((Task(makes=(0,), rise_bytes=5), Task(frozenset({0}), 9, (), (0,))), (3,))
    >>> measure_order(program, [0, 1])
    (5, 12)
    """
    waiting = _count_takers(program)
    live_bytes, peaks = 0, []
    for index in order:
        task = program.tasks[index]
        peaks.append(live_bytes + task.rise_bytes)
        live_bytes += sum(program.sizes[value] for value in task.makes)
        for value in task.takes:
            waiting[value] -= 1
            if not waiting[value] and value not in program.kept:
                live_bytes -= program.sizes[value]
    return tuple(peaks)


def is_legal(program: Program, order: Iterable[int]) -> bool:
    """Whether each task of an order comes after those that it has to."""
    done: set[int] = set()
    for index in order:
        if not program.tasks[index].after <= done:
            return False
        done.add(index)
    return True


def pin_independent(program: Program, roots: Iterable[int]) -> Program:
    """Keeps what depends on no root between the tasks where it stands.

    Such tasks could run anywhere, and the whole program would have to be searched at once. Here
    they stay on their side of each task whose place is the same in all orders of the others.

    Args:
        program: The tasks.
        roots: Those that the others are to depend on, directly or not.
    """
    given = frozenset(roots)
    relations = Relations(program)
    mask = sum(1 << root for root in given)
    bound = [i for i, before in enumerate(relations.before) if i in given or before & mask]
    inside = sum(1 << index for index in bound)
    fixed = {
        index
        for index in bound
        if ((relations.before[index] | relations.behind[index]) & inside).bit_count()
        == len(bound) - 1
    }
    tasks, last, waiting = [], frozenset[int](), set[int]()
    for index, task in enumerate(program.tasks):
        if not inside >> index & 1:
            waiting.add(index)
            tasks.append(replace(task, after=task.after | last))
        elif index in fixed:
            tasks.append(replace(task, after=task.after | waiting | last))
            last, waiting = frozenset({index}), set()
        else:
            tasks.append(task)
    return replace(program, tasks=tuple(tasks))


class Relations:
    """Which tasks come before which; sets of tasks are the bits of a number.

    Args:
        program: The tasks.

    Attributes:
        program: The tasks.
        before: By task, all that come before it in every order.
        behind: By task, all that come behind it in every order.
        nearest: By task, those before it that are before no other such.
        takers: By value, the tasks that take it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        size = len(program.tasks)
        self.before = [0] * size
        for index, task in enumerate(program.tasks):
            for other in task.after:
                self.before[index] |= self.before[other] | 1 << other
        self.behind = [0] * size
        for index in reversed(range(size)):
            for other in program.tasks[index].after:
                self.behind[other] |= self.behind[index] | 1 << index
        self.nearest = [self._find_nearest(index) for index in range(size)]
        self.takers = [0] * len(program.sizes)
        for index, task in enumerate(program.tasks):
            for value in task.takes:
                self.takers[value] |= 1 << index

    def _find_nearest(self, index: int) -> frozenset[int]:
        """Those before a task that are before no other such."""
        after = self.program.tasks[index].after
        further = 0
        for other in after:
            further |= self.before[other]
        return frozenset(other for other in after if not further >> other & 1)

    def iterate_parts(self) -> Iterator[range]:
        """Runs of tasks that lie between two others in every order."""
        size, start = len(self.before), 0
        for index in range(size):
            others = self.before[index].bit_count() + self.behind[index].bit_count()
            if others == size - 1:  # its place is the same in every order
                if index > start:
                    yield range(start, index)
                yield range(index, index + 1)
                start = index + 1
        if start < size:
            yield range(start, size)

    def bound_peak(self, tasks: Iterable[int]) -> int:
        """What one of some tasks holds in every order: values from before it for it or behind."""
        program, most = self.program, 0
        for index in tasks:
            later = self.behind[index] | 1 << index
            held = program.tasks[index].rise_bytes + sum(
                program.sizes[value]
                for other, task in enumerate(program.tasks[:index])
                if self.before[index] >> other & 1
                for value in task.makes
                if self.takers[value] & later or value in program.kept or not self.takers[value]
            )
            most = max(most, held)
        return most

    def measure_before(self, start: int) -> int:
        """What is alive when the tasks before a part are done."""
        program, done, live_bytes = self.program, (1 << start) - 1, 0
        for task in program.tasks[:start]:
            for value in task.makes:
                if self.takers[value] & ~done or value in program.kept or not self.takers[value]:
                    live_bytes += program.sizes[value]
        return live_bytes


def _count_takers(program: Program) -> list[int]:
    waiting = [0] * len(program.sizes)
    for task in program.tasks:
        for value in task.takes:
            waiting[value] += 1
    return waiting

"""Orders of tasks that hold less: an exact search over what is done, with long chains shortened.

What is alive depends only on which tasks are done, not on the order in which they were. So the best
way to each such set is found from those of one task less. Sets that already hold more than the best
order known are left out, and parts of the order that nothing crosses are searched by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

WIDTH = 1024
"""How many sets of as many tasks are followed at most; where there are more, those that hold most
are given up, and the order that is found need not be the best."""
_NEAREST_WIDTH = 256
"""Likewise, where the peak is known and the order is to be close to the given one."""


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


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of a program.

    Attributes:
        order: The tasks.
        peak_bytes: The most that is alive.
        is_best: Whether it is proven that no order holds less.
    """

    order: tuple[int, ...]
    peak_bytes: int
    is_best: bool


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
    relations = _Relations(program)
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


def find_schedule(program: Program, *, width: int = WIDTH, time_limit_s: float = 10.0) -> Schedule:
    """An order that holds less than the given one, as close to that as may be.

    Args:
        program: The tasks.
        width: How many sets of as many tasks are followed at most.
        time_limit_s: About how long it may take.

    Returns:
        The given order where none was found that holds less.
    """
    given = tuple(range(len(program.tasks)))
    peaks = measure_order(program, given)
    if not given:
        return Schedule((), 0, is_best=True)
    relations = _Relations(program)
    parts = [*relations.iterate_parts()]
    deadline = time.monotonic() + time_limit_s
    found: dict[range, _Found] = {}
    floor_bytes, is_best = 0, True
    for part in sorted(parts, key=lambda part: -max(peaks[part.start : part.stop])):
        before = max(peaks[part.start : part.stop])
        if before <= floor_bytes:
            break
        if relations.bound_peak(i for i in part if peaks[i] == before) == before:
            floor_bytes = before
            break
        result = _Search(relations, part, width, deadline).run(before - 1, floor_bytes)
        if result.order is None:
            floor_bytes, is_best = before, result.is_best
            break
        is_best = is_best and result.is_best
        found[part] = result
        floor_bytes = max(floor_bytes, result.peak_bytes)
    order = [*given]
    for part, result in found.items():  # again, for what changes least with the peak that is left
        search = _Search(relations, part, _NEAREST_WIDTH, deadline)
        nearest = search.run(floor_bytes, floor_bytes, is_near=True)
        order[part.start : part.stop] = nearest.order or result.order or ()
    peak_bytes = max(measure_order(program, order))
    if peak_bytes >= max(peaks):
        return Schedule(given, max(peaks), is_best)
    return Schedule(tuple(order), peak_bytes, is_best)


def _count_takers(program: Program) -> list[int]:
    waiting = [0] * len(program.sizes)
    for task in program.tasks:
        for value in task.takes:
            waiting[value] += 1
    return waiting


class _Relations:
    """Which tasks come before which; sets of tasks are the bits of a number."""

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


@dataclass(frozen=True, slots=True)
class _Group:
    """Tasks that run one after another without any other between."""

    members: tuple[int, ...]
    rise_bytes: int
    gain_bytes: int
    """By how much more is alive after them, were no value let go of whose takers vary."""
    open_values: tuple[int, ...]
    """The values that they take and are not known to be the last to take."""


@dataclass(frozen=True, slots=True)
class _Found:
    order: tuple[int, ...] | None
    peak_bytes: int
    is_best: bool


@dataclass(slots=True)
class _State:
    """The best way to have done some groups."""

    peak_bytes: int
    breaks: int
    live_bytes: int
    ready: int
    last: int
    way: tuple[object, ...] = field(default=())


class _Search:
    """Finds the best order of one part."""

    def __init__(self, relations: _Relations, part: range, width: int, deadline: float) -> None:
        self._relations = relations
        self._part = part
        self._width = width
        self._deadline = deadline
        self._groups = [*_iterate_groups(relations, part)]
        self._base = relations.measure_before(part.start)
        owner = {member: at for at, group in enumerate(self._groups) for member in group.members}
        self._needs = [0] * len(self._groups)
        self._frees: list[int] = [0] * len(self._groups)
        for at, group in enumerate(self._groups):
            for member in group.members:
                for other in relations.nearest[member]:
                    if owner.get(other, at) != at:
                        self._needs[at] |= 1 << owner[other]
                        self._frees[owner[other]] |= 1 << at
        done_outside = {value for group in self._groups for value in group.open_values}
        self._takers = {value: self._place_takers(value, owner) for value in done_outside}

    def _place_takers(self, value: int, owner: dict[int, int]) -> int:
        """The groups that take a value; a bit of none of them where it stays alive."""
        takers, groups = self._relations.takers[value], 0
        stays = value in self._relations.program.kept or takers >> self._part.stop
        for member, at in owner.items():
            if takers >> member & 1:
                groups |= 1 << at
        return groups | (1 << len(self._groups) if stays else 0)

    def run(self, limit_bytes: int, floor_bytes: int, *, is_near: bool = False) -> _Found:
        """The order that holds least.

        Args:
            limit_bytes: The most that it may hold.
            floor_bytes: What need not be gone below.
            is_near: Whether it is to be as close to the given order as may be.
        """
        full = (1 << len(self._groups)) - 1
        ready = sum(1 << at for at, needs in enumerate(self._needs) if not needs)
        layer = {0: _State(floor_bytes, 0, self._base, ready, self._part.start - 1)}
        is_best = True
        for _ in self._groups:
            following: dict[int, _State] = {}
            for done, state in layer.items():
                ready = state.ready if is_near else self._choose_ready(done, state)
                self._follow(done, state, ready, limit_bytes, following)
            if len(following) > self._width:
                is_best = False
                rate = _rate_near if is_near else _rate_low
                best = sorted(following.items(), key=lambda item: rate(item[1]))
                following = dict(best[: self._width])
            layer = following
            if time.monotonic() > self._deadline:
                return _Found(None, 0, is_best=False)
        if full not in layer:
            return _Found(None, 0, is_best)
        state = layer[full]
        return _Found(tuple(self._unwind(state.way)), state.peak_bytes, is_best)

    def _choose_ready(self, done: int, state: _State) -> int:
        """What may run next; where something lowers what is alive and raises no peak, only that.

        In any order it could come first: nothing would hold more.
        """
        ready = state.ready
        while ready:
            bit = ready & -ready
            ready ^= bit
            group = self._groups[bit.bit_length() - 1]
            if state.live_bytes + group.rise_bytes <= state.peak_bytes and (
                group.gain_bytes <= self._measure_freed(bit.bit_length() - 1, done | bit)
            ):
                return bit
        return state.ready

    def _follow(
        self,
        done: int,
        state: _State,
        ready: int,
        limit_bytes: int,
        following: dict[int, _State],
    ) -> None:
        while ready:
            bit = ready & -ready
            ready ^= bit
            at = bit.bit_length() - 1
            group = self._groups[at]
            peak_bytes = max(state.peak_bytes, state.live_bytes + group.rise_bytes)
            if peak_bytes > limit_bytes:
                continue
            breaks = state.breaks + (group.members[0] != state.last + 1)
            now = done | bit
            known = following.get(now)
            if known is None:
                live_bytes = state.live_bytes + group.gain_bytes - self._measure_freed(at, now)
                opened, freed = state.ready ^ bit, self._frees[at]
                while freed:
                    next_bit = freed & -freed
                    freed ^= next_bit
                    if not self._needs[next_bit.bit_length() - 1] & ~now:
                        opened |= next_bit
            elif (peak_bytes, breaks) < (known.peak_bytes, known.breaks):
                live_bytes, opened = known.live_bytes, known.ready
            else:
                continue
            last = group.members[-1]
            following[now] = _State(peak_bytes, breaks, live_bytes, opened, last, (state.way, at))

    def _measure_freed(self, at: int, done: int) -> int:
        sizes = self._relations.program.sizes
        return sum(
            sizes[value]
            for value in self._groups[at].open_values
            if not self._takers[value] & ~done
        )

    def _unwind(self, way: tuple[object, ...]) -> list[int]:
        groups: list[int] = []
        while way:
            way, at = way  # type: ignore[assignment]
            groups.append(at)  # type: ignore[arg-type]
        return [member for at in reversed(groups) for member in self._groups[at].members]


def _rate_low(state: _State) -> tuple[int, int]:
    return state.peak_bytes, state.live_bytes


def _rate_near(state: _State) -> tuple[int, int]:
    return state.breaks, state.live_bytes


def _iterate_groups(relations: _Relations, part: range) -> Iterator[_Group]:
    """The tasks of a part, what best runs in one go together."""
    for chain in _iterate_chains(relations, part):
        rated = [_rate_task(relations, index) for index in chain]
        for is_open, members in groupby(rated, key=lambda group: bool(group.open_values)):
            if is_open:
                yield from members
            else:
                yield from _merge_chain([*members])


def _rate_task(relations: _Relations, index: int) -> _Group:
    program = relations.program
    task = program.tasks[index]
    open_values = []
    gain_bytes = sum(program.sizes[value] for value in task.makes)
    for value in task.takes:
        others = relations.takers[value] & ~(1 << index)
        if value in program.kept or others & relations.behind[index]:
            continue  # another one takes it later in every order
        if others & ~relations.before[index]:
            open_values.append(value)
        else:
            gain_bytes -= program.sizes[value]
    return _Group((index,), task.rise_bytes, gain_bytes, tuple(open_values))


def _iterate_chains(relations: _Relations, part: range) -> Iterator[list[int]]:
    """Tasks of which each is all that waits for the one before it, and waits for nothing else."""
    followers: dict[int, list[int]] = {index: [] for index in part}
    for index in part:
        for other in relations.nearest[index]:
            if other in followers:
                followers[other].append(index)
    inside = {
        index: [other for other in relations.nearest[index] if other in followers] for index in part
    }
    for index in part:
        if len(inside[index]) == 1 and len(followers[inside[index][0]]) == 1:
            continue  # it lies in the chain of that one
        chain = [index]
        while len(followers[chain[-1]]) == 1 and len(inside[followers[chain[-1]][0]]) == 1:
            chain.append(followers[chain[-1]][0])
        yield chain


def _merge_chain(chain: Sequence[_Group]) -> Iterator[_Group]:
    """A chain as the fewest pieces between which others may have to run.

    After the point where least is alive, a piece goes over the highest point that is left, to the
    lowest one behind it; before, likewise from the end backwards. To run something else within a
    piece never holds less than before or after it. Source: Liu, "An application of generalized tree
    pebbling to sparse matrix factorization" (1987), and for values that exist before the chain
    Kayaaslan et al., "Scheduling series-parallel task graphs to minimize peak memory" (2018).
    """
    levels = [0]
    for group in chain:
        levels.append(levels[-1] + group.gain_bytes)
    hills = [level + group.rise_bytes for level, group in zip(levels, chain, strict=False)]
    size = len(chain)
    least = min(range(size + 1), key=lambda at: levels[at])
    cuts = {0, least, size}
    at = least
    while at < size:
        hill = max(range(at, size), key=lambda i: (hills[i], i))
        at = min(range(hill + 1, size + 1), key=lambda i: (levels[i], -i))
        cuts.add(at)
    at = least
    while at > 0:
        hill = min(range(at), key=lambda i: (-hills[i], i))
        at = min(range(hill + 1), key=lambda i: (levels[i], i))
        cuts.add(at)
    ordered = sorted(cuts)
    for start, stop in pairwise(ordered):
        yield _Group(
            tuple(member for group in chain[start:stop] for member in group.members),
            max(hills[start:stop]) - levels[start],
            levels[stop] - levels[start],
            (),
        )

"""Orders of tasks that hold less: an exact search over what is done, with long chains shortened.

What is alive depends only on which tasks are done, not on the order in which they were. So the best
way to each such set is found from those of one task less. Sets that already hold more than the best
order known are left out, and parts of the order that nothing crosses are searched by themselves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fxmem.planning.chain_pieces import iterate_groups
from fxmem.planning.tasks import Program, Relations, measure_order

WIDTH = 256
"""How many sets of as many tasks are followed at most; where there are more, those that hold most
are given up, and the order that is found need not be the best."""


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
    relations = Relations(program)
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
        search = _Search(relations, part, width, deadline)
        nearest = search.run(floor_bytes, floor_bytes, is_near=True)
        order[part.start : part.stop] = nearest.order or result.order or ()
    peak_bytes = max(measure_order(program, order))
    if peak_bytes >= max(peaks):
        return Schedule(given, max(peaks), is_best)
    return Schedule(tuple(order), peak_bytes, is_best)


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

    def __init__(self, relations: Relations, part: range, width: int, deadline: float) -> None:
        self._relations = relations
        self._part = part
        self._width = width
        self._deadline = deadline
        self._groups = [*iterate_groups(relations, part)]
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

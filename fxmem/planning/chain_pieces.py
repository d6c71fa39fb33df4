"""Chains of tasks as the fewest pieces between which other tasks may have to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from fxmem.planning.tasks import Relations


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks that run one after another without any other between.

    Attributes:
        members: The tasks.
        rise_bytes: The most that they hold above what is alive before them.
        gain_bytes: By how much more is alive after them, with all of ``open_values``.
        open_values: The values that they take, and are the last to take in some orders only.
    """

    members: tuple[int, ...]
    rise_bytes: int
    gain_bytes: int
    open_values: tuple[int, ...]


def iterate_groups(relations: Relations, part: range) -> Iterator[Group]:
    """The tasks of a part, what best runs in one go together.

    Args:
        relations: Of all tasks.
        part: Those that are meant: they lie between two others in every order.
    """
    for chain in _iterate_chains(relations, part):
        rated = [_rate_task(relations, index) for index in chain]
        for is_open, members in groupby(rated, key=lambda group: bool(group.open_values)):
            if is_open:
                yield from members
            else:
                yield from _merge_chain([*members])


def _rate_task(relations: Relations, index: int) -> Group:
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
    return Group((index,), task.rise_bytes, gain_bytes, tuple(open_values))


def _iterate_chains(relations: Relations, part: range) -> Iterator[list[int]]:
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


def _merge_chain(chain: Sequence[Group]) -> Iterator[Group]:
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
        yield Group(
            tuple(member for group in chain[start:stop] for member in group.members),
            max(hills[start:stop]) - levels[start],
            levels[stop] - levels[start],
            (),
        )

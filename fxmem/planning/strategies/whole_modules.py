"""The strategy of whole modules: which modules run all of their calls under checkpoints.

There are few modules, so simple ways find much: from nothing the next best module of all blocks,
again and again, the same modules of every block, every second block and so on, two such patterns
together, and where there are few modules the next best single one. Small changes follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from fxmem.planning.model.modules import group_modules
from fxmem.planning.model.segments import Segments, nest_spans
from fxmem.planning.strategies.candidates import Candidate
from fxmem.planning.strategies.problem import PlanProblem
from fxmem.planning.strategies.small_changes import draw_neighbour

_STEPS = (2, 3, 4)
"""Every second, third and fourth block."""
_FIRSTS = 6
"""In how many steps the first blocks become all."""
_PAIRS = 300
_LITTLE = 0.05
"""Of what the next step can save at most: what saves less is next to free, and waits."""
_MANY = 64
"""Modules that are not tried one by one."""
_TRIALS = 4000

Chosen = frozenset[int]
"""Positions of modules in the list of them all."""


class _Choices:
    """The segments of chosen modules, and the choice that segments come from."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.groups = [*group_modules(problem.modules).values()]
        self.chosen: dict[Segments, Chosen] = {}

    def place(self, chosen: Chosen) -> Segments:
        modules = self.problem.modules
        segments = nest_spans(span for at in chosen for span in modules[at].spans)
        self.chosen[segments] = chosen
        return segments


def propose_modules(problem: PlanProblem) -> Iterator[Segments]:
    """Grows choices of modules from nothing, and tries patterns."""
    yield from _propose(_Choices(problem))


def choose_modules(problem: PlanProblem) -> Iterator[Segments]:
    """Grows choices from nothing, tries patterns, and changes the best of them."""
    choices = _Choices(problem)
    yield from _propose(choices)
    if problem.modules:
        yield from problem.limit_trials(_change(choices), _TRIALS)


def _propose(choices: _Choices) -> Iterator[Segments]:
    yield choices.place(frozenset())
    yield from _grow(choices, [frozenset(group) for group in choices.groups])
    for chosen in _propose_patterns(choices.groups):
        yield choices.place(chosen)
    modules = choices.problem.modules
    if len(modules) <= _MANY:
        yield from _grow(choices, [frozenset({at}) for at in range(len(modules))])


def _grow(choices: _Choices, units: Sequence[Chosen]) -> Iterator[Segments]:
    """Adds to nothing what saves most for its cost, again and again."""
    pool = choices.problem.pool
    current: Candidate | None = pool.found[()]
    while current is not None:
        chosen = choices.chosen[current.segments]
        more = []
        for unit in units:
            if not unit <= chosen:
                segments = choices.place(chosen | unit)
                yield segments
                more.append(pool.found[segments])
        current = _choose_next(current, more)


def _change(choices: _Choices) -> Iterator[Segments]:
    problem = choices.problem
    while True:
        near = problem.goal.list_near(problem.front)
        parents = [choices.chosen[candidate.segments] for candidate in near]
        chosen = _mutate(problem.random, parents, choices.groups, len(problem.modules))
        yield choices.place(chosen)


def _choose_next(current: Candidate, more: Sequence[Candidate]) -> Candidate | None:
    """The one of some larger choices that saves most for its cost; None where none saves."""
    most = current.peak_bytes - min((c.peak_bytes for c in more), default=current.peak_bytes)
    saving = [c for c in more if current.peak_bytes - c.peak_bytes >= max(1, _LITTLE * most)]
    return max(
        saving,
        key=lambda c: (current.peak_bytes - c.peak_bytes) / max(c.cost - current.cost, 1e-9),
        default=None,
    )


def _propose_patterns(groups: Sequence[Sequence[int]]) -> Iterator[Chosen]:
    """Modules whose names differ in numbers only, all, every k-th or the first; and two such."""
    for group in groups:
        yield frozenset(group)
    several = [group for group in groups if len(group) > 1]
    for group in several:
        for step in _STEPS:
            yield frozenset(group[::step])
            yield frozenset(group) - frozenset(group[::step])
    for count, (one, other) in enumerate(combinations(several, 2)):
        if count == _PAIRS:
            break
        yield frozenset((*one, *other))
    for group in several:
        for step in range(1, _FIRSTS):
            stop = len(group) * step // _FIRSTS
            yield frozenset(group[:stop])
            yield frozenset(group[stop:])


def _mutate(
    rng: Random, parents: Sequence[Chosen], groups: Sequence[Sequence[int]], count: int
) -> Chosen:
    """A variation of one of some choices, or two of them put together."""
    at = rng.randrange(len(parents))
    chosen = set(parents[at])
    if len(parents) > 1 and rng.random() < 0.3:
        other = parents[draw_neighbour(rng, at, len(parents))]
        cut = rng.randrange(count + 1)
        return frozenset({a for a in chosen if a < cut} | {a for a in other if a >= cut})
    while True:
        kind = rng.random()
        if chosen and kind < 0.3:
            chosen.remove(rng.choice(sorted(chosen)))
        elif chosen and kind < 0.5:  # one for another
            chosen.remove(rng.choice(sorted(chosen)))
            chosen.add(rng.randrange(count))
        elif kind < 0.75:
            chosen.add(rng.randrange(count))
        else:  # the same module of several blocks
            group = rng.choice(groups)
            start, stop = sorted((rng.randrange(len(group)), rng.randrange(len(group) + 1)))
            chosen ^= {*group[start:stop]}
        if rng.random() > 0.4:
            return frozenset(chosen)

"""The search for plans that compute whole modules again.

There are few modules, so simple ways find much: from nothing the next best module of all blocks,
again and again, the same modules of every block, every second block and so on, two such patterns
together, and where there are few modules the next best single one. What they find is then improved
by small changes, as in :mod:`fxmem.planning.strategies.search`, which begins with it too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import combinations

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.modules import ModuleChoice, group_modules, nest_spans
from fxmem.planning.model.score import Scorer
from fxmem.planning.strategies.candidates import Candidate, CandidatePool, find_near
from fxmem.planning.strategies.mutation import draw_neighbour

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
_DRAWS = 4 * _TRIALS
_SHARE = 0.6
"""Of the time there is, for what is proposed; the rest is for improving it."""

Chosen = frozenset[int]
"""Positions of modules in the list of them all."""


def find_module_front(
    recorded: StepIndex,
    choices: Sequence[ModuleChoice],
    costs: Sequence[float],
    time_limit_s: float,
    goal_bytes: int | None = None,
    goal_cost: float | None = None,
) -> tuple[Candidate, ...]:
    """The best choices of modules found: each costs less than all that take less memory.

    Args:
        recorded: The step.
        choices: The modules that may be computed again.
        costs: Of each operation, by its index.
        time_limit_s: When to stop searching.
        goal_bytes: The peak that matters most: the search goes on near it.
        goal_cost: Likewise the cost.

    Returns:
        Cheapest first; the first computes nothing again.
    """
    began = time.monotonic()
    tried = CandidatePool(Scorer(recorded, costs))
    search = _Search(choices, tried)
    search.propose(began + _SHARE * time_limit_s)
    search.improve(random.Random(0), began + time_limit_s, goal_bytes, goal_cost)
    return tried.front


def try_modules(tried: CandidatePool, choices: Sequence[ModuleChoice], deadline: float) -> None:
    """Scores choices of modules that are simple to find, as a beginning for other searches.

    Args:
        tried: Where they are scored.
        choices: The modules that may be computed again.
        deadline: When to stop, by ``time.monotonic()``.
    """
    _Search(choices, tried).propose(deadline)


class _Search:
    """Choices of modules, and what they scored."""

    def __init__(self, choices: Sequence[ModuleChoice], tried: CandidatePool) -> None:
        self._choices = choices
        self._groups = [*group_modules(choices).values()]
        self._tried = tried
        self._chosen: dict[Candidate, Chosen] = {}
        self._score(frozenset())

    def propose(self, deadline: float) -> None:
        """Scores what grows from nothing, and patterns."""
        self._grow([frozenset(group) for group in self._groups], deadline)
        for chosen in _propose_patterns(self._groups):
            if time.monotonic() > deadline:
                return
            self._score(chosen)
        if len(self._choices) <= _MANY:
            self._grow([frozenset({at}) for at in range(len(self._choices))], deadline)

    def _grow(self, units: Sequence[Chosen], deadline: float) -> None:
        """From nothing, adds what saves most for its cost, again and again."""
        current: Candidate | None = self._score(frozenset())
        while current is not None:
            chosen = self._chosen[current]
            more = []
            for unit in units:
                if time.monotonic() > deadline:
                    return
                if not unit <= chosen:
                    more.append(self._score(chosen | unit))
            current = _choose_next(current, more)

    def improve(
        self,
        rng: random.Random,
        deadline: float,
        goal_bytes: int | None,
        goal_cost: float | None,
    ) -> None:
        """Small changes to what is best, drawn at random."""
        if not self._choices:
            return
        most = len(self._tried.found) + _TRIALS
        for _ in range(_DRAWS):
            if len(self._tried.found) == most or time.monotonic() > deadline:
                return
            near = find_near(self._tried.front, goal_bytes, goal_cost)
            parents = [self._chosen[candidate] for candidate in near]
            self._score(_mutate(rng, parents, self._groups, len(self._choices)))

    def _score(self, chosen: Chosen) -> Candidate:
        segments = nest_spans(span for at in chosen for span in self._choices[at].spans)
        candidate = self._tried.score(segments)
        self._chosen[candidate] = chosen
        return candidate


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
    rng: random.Random, parents: Sequence[Chosen], groups: Sequence[Sequence[int]], count: int
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

"""The search for plans that compute whole modules again.

There are few modules, so simple ways find much: the same modules of every block, every second
block and so on, two such patterns together, and from nothing the next best module, or where there
are many the next best pattern, again and again. What they find is then improved by small changes,
as in :mod:`fxmem.planning.search`.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from fxmem.planning.facts import StepFacts
from fxmem.planning.modules import ModuleChoice, nest_spans
from fxmem.planning.scoring import Scorer
from fxmem.planning.search import Candidate, find_near, is_better, prune_candidates

_STEPS = (2, 3, 4)
"""Every second, third and fourth block."""
_FIRSTS = 6
"""In how many steps the first blocks become all."""
_PAIRS = 300
_MANY = 64
"""Modules that are not tried one by one."""
_TRIALS = 4000
_DRAWS = 4 * _TRIALS
_SHARE = 0.6
"""Of the time there is, for what is proposed; the rest is for improving it."""
_NUMBER = re.compile(r"\d+")

Chosen = frozenset[int]
"""Positions of modules in the list of them all."""


def find_module_front(
    facts: StepFacts,
    choices: Sequence[ModuleChoice],
    costs: Sequence[float],
    time_limit_s: float = 10.0,
    goal_bytes: int | None = None,
    goal_cost: float | None = None,
) -> tuple[Candidate, ...]:
    """The best choices of modules found: each costs less than all that take less memory.

    Args:
        facts: The step.
        choices: The modules that may be computed again.
        costs: Of each operation, by its index.
        time_limit_s: When to stop searching.
        goal_bytes: The peak that matters most: the search goes on near it.
        goal_cost: Likewise the cost.

    Returns:
        Cheapest first; the first computes nothing again.
    """
    search = _Search(facts, choices, costs, time.monotonic() + time_limit_s)
    search.try_all(_propose_patterns(choices), _SHARE * time_limit_s)
    search.grow(_SHARE * time_limit_s)
    search.improve(random.Random(0), goal_bytes, goal_cost)
    return search.front


class _Search:
    """What was scored, and the best of it."""

    def __init__(
        self,
        facts: StepFacts,
        choices: Sequence[ModuleChoice],
        costs: Sequence[float],
        deadline: float,
    ) -> None:
        self._choices = choices
        self._scorer = Scorer(facts, costs)
        self._began = time.monotonic()
        self._deadline = deadline
        self._found: dict[Chosen, Candidate] = {}
        self._chosen: dict[Candidate, Chosen] = {}
        self.front: tuple[Candidate, ...] = ()
        self._try(frozenset())

    def try_all(self, proposals: Iterator[Chosen], time_s: float) -> None:
        """Scores proposals as long as there is time."""
        for chosen in proposals:
            if time.monotonic() - self._began > time_s:
                return
            self._try(chosen)

    def grow(self, time_s: float) -> None:
        """From nothing, adds what saves most for its cost, again and again."""
        units = [frozenset({at}) for at in range(len(self._choices))]
        if len(units) > _MANY:
            units = [frozenset(group) for group in _group(self._choices).values()]
        current = self._found[frozenset()]
        while True:
            chosen = self._chosen[current]
            best, best_worth = None, 0.0
            for unit in units:
                if unit <= chosen:
                    continue
                if time.monotonic() - self._began > time_s:
                    return
                candidate = self._try(chosen | unit)
                saving = current.peak_bytes - candidate.peak_bytes
                worth = saving / max(candidate.cost - current.cost, 1e-9)
                if saving > 0 and worth > best_worth:
                    best, best_worth = candidate, worth
            if best is None:
                return
            current = best

    def improve(self, rng: random.Random, goal_bytes: int | None, goal_cost: float | None) -> None:
        """Small changes to what is best, drawn at random."""
        if not self._choices:
            return
        groups = [*_group(self._choices).values()]
        tried = len(self._found) + _TRIALS
        for _ in range(_DRAWS):
            if len(self._found) >= tried or time.monotonic() > self._deadline:
                return
            parents = [self._chosen[c] for c in find_near(self.front, goal_bytes, goal_cost)]
            self._try(_mutate(rng, parents, groups, len(self._choices)))

    def _try(self, chosen: Chosen) -> Candidate:
        candidate = self._found.get(chosen)
        if candidate is None:
            regions = nest_spans(span for at in chosen for span in self._choices[at].spans)
            candidate = Candidate(regions, *self._scorer.score(regions))
            self._found[chosen] = candidate
            if not self.front or is_better(candidate, self.front):
                self._chosen[candidate] = chosen
                self.front = prune_candidates((*self.front, candidate))
            self._chosen.setdefault(candidate, chosen)
        return candidate


def _propose_patterns(choices: Sequence[ModuleChoice]) -> Iterator[Chosen]:
    """Modules whose names differ in numbers only, all, every k-th or the first; and two such."""
    groups = [*_group(choices).values()]
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


def _group(choices: Sequence[ModuleChoice]) -> Mapping[str, list[int]]:
    """Positions of modules by their names without numbers.

    >>> choices = [ModuleChoice(name, ()) for name in ("h.0", "h.0.mlp", "h.1", "h.1.mlp")]
    >>> _group(choices)
    {'h.*': [0, 2], 'h.*.mlp': [1, 3]}
    """
    groups: dict[str, list[int]] = {}
    for at, choice in enumerate(choices):
        groups.setdefault(_NUMBER.sub("*", choice.fqn), []).append(at)
    return groups


def _mutate(
    rng: random.Random, parents: Sequence[Chosen], groups: Sequence[Sequence[int]], count: int
) -> Chosen:
    """A variation of one of some choices, or two of them put together."""
    at = rng.randrange(len(parents))
    chosen = set(parents[at])
    if len(parents) > 1 and rng.random() < 0.3:
        other = parents[max(0, min(len(parents) - 1, at + rng.choice((-2, -1, 1, 2))))]
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

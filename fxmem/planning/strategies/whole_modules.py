"""The strategy of whole modules: which modules run all of their calls under checkpoints.

From nothing, the next best module of all blocks is added again and again; small changes follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from fxmem.planning.model.modules import group_modules
from fxmem.planning.model.segments import Segments, nest_spans
from fxmem.planning.strategies.candidates import Candidate
from fxmem.planning.strategies.problem import PlanProblem
from fxmem.planning.strategies.small_changes import draw_neighbour

_LITTLE = 0.05
"""Share of the most that the next step can save: what saves less is next to free, and waits."""
_TRIALS = 4000
_TRIALS_BESIDE = 1000
"""Where other strategies follow."""

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


def choose_modules(problem: PlanProblem) -> Iterator[Segments]:
    """Grows choices of modules from nothing, and changes the best of them."""
    choices = _Choices(problem)
    yield from _grow(choices)
    if problem.modules:
        trials = _TRIALS if problem.whole_modules else _TRIALS_BESIDE
        yield from problem.limit_trials(_change(choices), trials)


def _grow(choices: _Choices) -> Iterator[Segments]:
    """Adds to nothing what saves most for its cost, again and again."""
    pool = choices.problem.pool
    yield choices.place(frozenset())
    current: Candidate | None = pool.found[()]
    while current is not None:
        chosen = choices.chosen[current.segments]
        more = []
        for group in map(frozenset, choices.groups):
            if not group <= chosen:
                segments = choices.place(chosen | group)
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
    """Chooses the larger choice that saves most for its cost; None where none saves."""
    most = current.peak_bytes - min((c.peak_bytes for c in more), default=current.peak_bytes)
    saving = [c for c in more if current.peak_bytes - c.peak_bytes >= max(1, _LITTLE * most)]
    return max(
        saving,
        key=lambda c: (current.peak_bytes - c.peak_bytes) / max(c.cost - current.cost, 1e-9),
        default=None,
    )


def _mutate(
    rng: Random, parents: Sequence[Chosen], groups: Sequence[Sequence[int]], count: int
) -> Chosen:
    """Varies one of some choices, or puts two together."""
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

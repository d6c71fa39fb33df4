"""The strategy of whole modules: which modules run all of their calls under checkpoints.

From nothing, the next best module of all blocks is added again and again; small changes follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from fxmem.planning.model.segment_ranges import Segments, nest_spans
from fxmem.planning.strategies.problem import Candidate, PlanProblem
from fxmem.planning.strategies.small_changes import draw_neighbour

_LITTLE = 0.05
"""Share of the most that the next step can save: what saves less is next to free, and waits."""
_TRIALS = 4000
_TRIALS_BESIDE = 1000  # where other strategies follow

Chosen = frozenset[int]
"""Positions of modules in the list of them all."""


def choose_modules(problem: PlanProblem) -> Iterator[Segments]:
    """Grows choices of modules from nothing, and changes the best of them."""
    alike: dict[str, list[int]] = {}  # by name without numbers: h.0.mlp and h.1.mlp go together
    for at, choice in enumerate(problem.modules):
        alike.setdefault(re.sub(r"\d+", "*", choice.fqn), []).append(at)
    groups = [*alike.values()]
    choices: dict[Segments, Chosen] = {}

    def place(chosen: Chosen) -> Segments:
        segments = nest_spans(span for at in chosen for span in problem.modules[at].spans)
        choices[segments] = chosen
        return segments

    yield place(frozenset())
    current: Candidate | None = problem.found[()]
    while current is not None:
        chosen, more = choices[current.segments], []
        for group in map(frozenset, groups):
            if not group <= chosen:
                segments = place(chosen | group)
                yield segments
                more.append(problem.found[segments])
        current = _choose_next(current, more)

    def vary() -> Iterator[Segments]:
        while True:
            near = problem.goal.list_near(problem.front)
            parents = [choices[candidate.segments] for candidate in near]
            yield place(_mutate(problem.random, parents, groups, len(problem.modules)))

    if problem.modules:
        trials = _TRIALS if problem.whole_modules else _TRIALS_BESIDE
        yield from problem.limit_trials(vary(), trials)


def _choose_next(current: Candidate, more: Sequence[Candidate]) -> Candidate | None:
    """Chooses the larger choice that saves most for its cost; None where none saves."""
    most = max((current.peak_bytes - c.peak_bytes for c in more), default=0)
    saving = [c for c in more if current.peak_bytes - c.peak_bytes >= max(1, _LITTLE * most)]
    return max(
        saving,
        key=lambda c: (current.peak_bytes - c.peak_bytes) / max(c.cost - current.cost, 1e-9),
        default=None,
    )


def _mutate(
    rng: Random, parents: Sequence[Chosen], groups: Sequence[Sequence[int]], count: int
) -> Chosen:
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

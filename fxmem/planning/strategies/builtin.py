"""The built-in strategies by their names, of which `search` is the default.

Choices of whole modules grow from nothing: the next best module of all blocks is added again and
again, and small changes follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from fxmem.errors import UsageError
from fxmem.planning.model.recomputation import Segments, nest_spans
from fxmem.planning.strategies.chain import find_least_memory, measure_kept, solve_chain
from fxmem.planning.strategies.problem import (
    Candidate,
    PlanProblem,
    Proposer,
    Strategy,
    check_proposals,
)
from fxmem.planning.strategies.small_changes import change_segments, draw_neighbour
from fxmem.planning.strategies.stages import cut_step, list_cuts

_LITTLE = 0.05
"""Share of the most that the next step can save: what saves less is next to free, and waits."""
_TRIALS = 4000
_TRIALS_BESIDE = 1000  # where other strategies follow
_BUDGETS = 40
_MOST_STAGES = 96
"""The chain's solver takes time in the third power of the number of stages."""

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


def propose_schedules(problem: PlanProblem) -> Iterator[Segments]:
    """Solves chains of stages, for several cuts of the step and many budgets.

    The two measures of cost lead to different options and schedules, so both are used; what they
    propose is scored by the problem's own.
    """
    step, limits = problem.step, problem.limits
    cuts = [starts for starts in list_cuts(step, limits) if len(starts) <= _MOST_STAGES]
    for costs in filter(len, (problem.costs, problem.other_costs)):
        staged_steps = [cut_step(step, limits, costs, starts) for starts in cuts]
        for staged in staged_steps:  # at once, where time is short
            for level in range(max(map(len, staged.options))):
                chosen = (options[min(level, len(options) - 1)] for options in staged.options)
                yield tuple(segment for option in chosen for segment in option)
        for staged in sorted(staged_steps, key=lambda staged: len(staged.bounds)):
            # With less memory than any schedule can do with, the solver answers with one that
            # recomputes nodes that must not be: it knows them by their price alone.
            least, most = find_least_memory(staged.chain), measure_kept(staged.chain)
            shares = ((at / _BUDGETS) ** 1.5 for at in range(_BUDGETS))  # closer where it is scarce
            budgets = [least + round((most - least) * share) for share in shares]
            for segments in map(staged.list_segments, solve_chain(staged.chain, budgets)):
                if all(map(limits.allows, segments)):
                    yield segments


def search(problem: PlanProblem) -> Iterator[Segments]:
    """Proposes modules, schedules of chains and small changes to the best; or modules alone."""
    yield from choose_modules(problem)
    if not problem.whole_modules:
        yield from propose_schedules(problem)
        yield from change_segments(problem)


STRATEGIES: Mapping[str, Proposer] = {
    "search": search,
    "modules": choose_modules,
    "schedules": check_proposals(propose_schedules),  # none are whole modules
    "changes": check_proposals(change_segments),
}


def resolve_strategy(strategy: str | Strategy | None) -> Proposer:
    """Finds the strategy of a name, or wraps the user's own, whose proposals are checked.

    Raises:
        UsageError: There is no strategy of that name.
    """
    if callable(strategy):
        return check_proposals(strategy)
    if strategy is not None and strategy not in [*STRATEGIES]:
        raise UsageError(f"unknown strategy {strategy!r}", hint=" or ".join(STRATEGIES))
    return STRATEGIES[strategy or "search"]

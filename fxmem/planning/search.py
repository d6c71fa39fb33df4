"""The search for plans: many candidates, each scored on the true peak of the simulated step.

The chain's solver proposes schedules for several ways to cut the step into stages and many budgets,
the program over segments what to save value by value; patterns (:mod:`fxmem.planning.patterns`)
are proposed before them. Whatever was found is then improved by small changes and by putting the
beginning of one together with the end of another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxmem.planning.chain import keep_stages, measure_schedule
from fxmem.planning.chain_solver import find_least_memory, solve_chain
from fxmem.planning.facts import StepFacts
from fxmem.planning.limits import Limits
from fxmem.planning.mutation import mutate_regions
from fxmem.planning.patterns import propose_patterns
from fxmem.planning.regions import Region
from fxmem.planning.scoring import Scorer
from fxmem.planning.segment_program import propose_saved
from fxmem.planning.stages import StagedStep, cut_step, find_blocks, find_boundaries

_STAGES = (48, 32, 20, 12, 8)
"""How many stages there may be, in one cut after the other."""
_LEVELS = (1, 2, 3)
"""How many numbers of a module's name make a block."""
_BUDGETS = 40
_NEAR = 6
"""Candidates on each side of the goal that are varied, where there is a goal."""
_MOST_STAGES = 200
_MOST_SOLVED = 96
"""The chain's solver takes time in the third power of this."""
_TRIALS = 6000
_DRAWS = 2 * _TRIALS
"""What is drawn is often known already where the step is small."""
_SHARE = 0.5
"""Of the time there is, for what the solver proposes; the rest is for improving it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Regions with their score.

    Attributes:
        regions: What is computed again.
        peak_bytes: Of the whole step.
        cost: What is computed again, in the unit of the costs that were given.
    """

    regions: tuple[Region, ...]
    peak_bytes: int
    cost: float


def find_front(
    facts: StepFacts,
    limits: Limits,
    costs: Sequence[float],
    time_limit_s: float = 10.0,
    goal_bytes: int | None = None,
    goal_cost: float | None = None,
    other_costs: Sequence[float] = (),
) -> tuple[Candidate, ...]:
    """The best candidates found: each costs less than all that take less memory.

    Args:
        facts: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.
        time_limit_s: When to stop searching. What is found before depends on nothing else.
        goal_bytes: The peak that matters most: the search goes on near it.
        goal_cost: Likewise the cost.
        other_costs: Another measure of cost, by which some of what is scored is found.

    Returns:
        Cheapest first; the first computes nothing again.
    """
    began = time.monotonic()
    scorer = Scorer(facts, costs)
    cuts = _list_cuts(facts, limits)
    found: dict[tuple[Region, ...], Candidate] = {}
    for regions in _propose_regions(facts, limits, filter(len, (costs, other_costs)), cuts):
        if regions not in found:
            found[regions] = Candidate(regions, *scorer.score(regions))
        if time.monotonic() - began > _SHARE * time_limit_s:
            break
    front = prune_candidates(found.values())
    positions = sorted({start for cut in cuts for start in cut})
    rng = random.Random(0)
    tried = len(found) + _TRIALS
    for _ in range(_DRAWS):
        if len(found) == tried or time.monotonic() - began > time_limit_s:
            break
        parents = [c.regions for c in find_near(front, goal_bytes, goal_cost)]
        regions = mutate_regions(rng, parents, positions, facts, limits)
        if regions not in found:
            found[regions] = candidate = Candidate(regions, *scorer.score(regions))
            if is_better(candidate, front):
                front = prune_candidates((*front, candidate))
    return front


def prune_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both memory and cost; cheapest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.peak_bytes)):
        if not front or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return tuple(front)


def find_near(
    front: Sequence[Candidate], goal_bytes: int | None, goal_cost: float | None
) -> Sequence[Candidate]:
    """Those next to a goal; all where there is none.

    Args:
        front: Cheapest first.
        goal_bytes: The peak that matters most.
        goal_cost: Likewise the cost.
    """
    if goal_bytes is not None:
        at = sum(candidate.peak_bytes > goal_bytes for candidate in front)
    elif goal_cost is not None:
        at = sum(candidate.cost <= goal_cost for candidate in front)
    else:
        return front
    return front[max(0, at - _NEAR) : at + _NEAR]


def is_better(candidate: Candidate, front: Sequence[Candidate]) -> bool:
    """Whether nothing of a front takes and costs as little."""
    return not any(c.cost <= candidate.cost and c.peak_bytes <= candidate.peak_bytes for c in front)


def _list_cuts(facts: StepFacts, limits: Limits) -> list[tuple[int, ...]]:
    """Ways to cut the step into stages, each once."""
    cuts = [find_blocks(facts, limits, level) for level in _LEVELS]
    cuts += [find_boundaries(facts, limits, most) for most in _STAGES]
    return [cut for cut in dict.fromkeys(map(tuple, cuts)) if len(cut) <= _MOST_STAGES]


def _propose_regions(
    facts: StepFacts,
    limits: Limits,
    measures: Iterable[Sequence[float]],
    cuts: Sequence[tuple[int, ...]],
) -> Iterator[tuple[Region, ...]]:
    """What takes longer to find comes later, since time may be up before."""
    yield ()
    for costs in measures:
        steps = []
        for starts in cuts:
            staged = cut_step(facts, limits, costs, starts)
            steps.append(staged)
            for proposed in propose_patterns(staged):
                yield tuple(region for region in proposed if limits.allows(region))
        solved = [staged for staged in steps if len(staged.ranges) <= _MOST_SOLVED]
        solved.sort(key=lambda staged: len(staged.ranges))
        for staged in solved:
            # Where memory is scarcer than any schedule can do with, the solver answers with one
            # that runs again what it must not: it knows that by a price only.
            yield from (found for found in _solve_chain(staged) if all(map(limits.allows, found)))
        for staged in solved:
            for proposed in propose_saved(facts, limits, costs, staged):
                yield tuple(region for region in proposed if limits.allows(region))


def _solve_chain(staged: StagedStep) -> Iterator[tuple[Region, ...]]:
    least, free = find_least_memory(staged.chain), keep_stages(staged.chain)
    if least is None or free is None:
        return
    most = measure_schedule(staged.chain, free).peak_bytes
    # Closer to each other where memory is scarce and a little of it is worth much.
    budgets = [least + round((most - least) * (step / _BUDGETS) ** 1.5) for step in range(_BUDGETS)]
    for solution in solve_chain(staged.chain, budgets):
        if solution is not None:
            yield staged.list_regions(solution.schedule)

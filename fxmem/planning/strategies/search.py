"""The search for plans: many candidates, each scored on the true peak of the simulated step.

Whole modules that are alike come first, then patterns, schedules of the chain's solver for several
ways to cut the step into stages, and the program over values. Where the best then lie far apart,
the beginning of one is put together with the end of the other, and all is improved by small
changes.
"""

from __future__ import annotations

import functools
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.modules import group_modules, list_calls
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.strategies.candidates import Candidate, CandidatePool, find_near
from fxmem.planning.strategies.chain import keep_stages, measure_schedule
from fxmem.planning.strategies.chain_solver import find_least_memory, solve_chain
from fxmem.planning.strategies.module_search import try_modules
from fxmem.planning.strategies.mutation import join_segments, mutate_segments
from fxmem.planning.strategies.patterns import propose_patterns
from fxmem.planning.strategies.segment_program import propose_saved
from fxmem.planning.strategies.stages import StagedStep, cut_step, find_blocks, find_boundaries

_STAGES = (48, 32, 20, 12, 8)
"""How many stages there may be, in one cut after the other."""
_LEVELS = (1, 2, 3)
"""How many numbers of a module's name make a block."""
_BUDGETS = 40
_MOST_STAGES = 200
_MOST_SOLVED = 96
"""The chain's solver takes time in the third power of this."""
_GAPS = 80
"""Between neighbours of the best, the widest first, that are tried to be closed."""
_CUTS = 6
"""Where that is tried, in each."""
_TRIALS = 6500
_TRIALS_NEAR = 9000
"""Where there is a goal: small changes, next to it."""
_ROUNDS = 3
"""How often it is then looked for changes elsewhere, at most, and near it again."""
_DRAWS = 2
"""For each trial: what is drawn is often known already where the step is small."""
_SHARE = 0.5
"""Of the time there is, for what is proposed; the rest is for improving it."""
_MODULES_SHARE = 0.1
"""Likewise for choices of modules, which come first."""


def find_front(
    step: StepIndex,
    limits: Limits,
    costs: Sequence[float],
    time_limit_s: float,
    goal_bytes: int | None = None,
    goal_cost: float | None = None,
    other_costs: Sequence[float] = (),
) -> tuple[Candidate, ...]:
    """The best candidates found: each costs less than all that take less memory.

    Args:
        step: The step.
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
    deadline = began + time_limit_s
    tried = CandidatePool(Scorer(step, costs))
    modules = list_calls(step, limits)
    try_modules(tried, modules, began + _MODULES_SHARE * time_limit_s)
    cuts = _list_cuts(step, limits)
    for segments in _propose_segments(step, limits, filter(len, (costs, other_costs)), cuts):
        tried.score(segments)
        if time.monotonic() - began > _SHARE * time_limit_s:
            break
    positions = sorted({start for cut in cuts for start in cut})
    _fill_gaps(tried, positions, goal_bytes, goal_cost, deadline)
    groups = [[modules[at].spans for at in kind] for kind in group_modules(modules).values()]
    mutate = functools.partial(
        mutate_segments,
        random.Random(0),
        positions=positions,
        groups=groups,
        step=step,
        limits=limits,
    )
    near = functools.partial(mutate, is_near=True)
    if goal_bytes is None and goal_cost is None:
        # Where there are no modules, small changes find the most.
        _vary(tried, mutate if groups else near, None, None, _TRIALS, deadline)
        return tried.front
    _vary(tried, near, goal_bytes, goal_cost, _TRIALS_NEAR, deadline)
    for _ in range(_ROUNDS):
        before = _find_best(tried.front, goal_bytes, goal_cost)
        _vary(tried, mutate, None, None, _TRIALS, deadline)  # better may be reached from elsewhere
        _vary(tried, near, goal_bytes, goal_cost, _TRIALS_NEAR, deadline)
        if _find_best(tried.front, goal_bytes, goal_cost) is before:
            break
    return tried.front


def _find_best(
    front: Sequence[Candidate], goal_bytes: int | None, goal_cost: float | None
) -> Candidate:
    """The cheapest within a budget, or else the leanest; the leanest that costs no more."""
    if goal_bytes is not None:
        return next((each for each in front if each.peak_bytes <= goal_bytes), front[-1])
    assert goal_cost is not None
    return next((each for each in reversed(front) if each.cost <= goal_cost), front[0])


def _vary(
    tried: CandidatePool,
    mutate: Callable[[Sequence[tuple[SegmentRange, ...]]], tuple[SegmentRange, ...]],
    goal_bytes: int | None,
    goal_cost: float | None,
    trials: int,
    deadline: float,
) -> None:
    """Changes to the best, next to a goal where there is one."""
    most = len(tried.found) + trials
    for _ in range(_DRAWS * trials):
        if len(tried.found) == most or time.monotonic() > deadline:
            return
        near = find_near(tried.front, goal_bytes, goal_cost)
        tried.score(mutate([candidate.segments for candidate in near]))


def _fill_gaps(
    tried: CandidatePool,
    positions: Sequence[int],
    goal_bytes: int | None,
    goal_cost: float | None,
    deadline: float,
) -> None:
    """Between neighbours that lie far apart, begins as one of them does and ends as the other."""
    done: set[tuple[Candidate, Candidate]] = set()
    for _ in range(_GAPS):
        pairs = pairwise(find_near(tried.front, goal_bytes, goal_cost))
        waiting = [pair for pair in pairs if pair not in done]
        if not waiting:
            return
        one, other = max(waiting, key=lambda pair: pair[0].peak_bytes / pair[1].peak_bytes)
        done.add((one, other))
        apart = {*one.segments} ^ {*other.segments}
        low, high = min(r.start for r in apart), max(r.stop for r in apart)
        cuts = positions[bisect_right(positions, low) : bisect_left(positions, high)]
        for cut in cuts[:: len(cuts) // _CUTS + 1]:
            if time.monotonic() > deadline:
                return
            tried.score(join_segments(one.segments, other.segments, cut))
            tried.score(join_segments(other.segments, one.segments, cut))


def _list_cuts(step: StepIndex, limits: Limits) -> list[tuple[int, ...]]:
    """Ways to cut the step into stages, each once."""
    cuts = [find_blocks(step, limits, level) for level in _LEVELS]
    cuts += [find_boundaries(step, limits, most) for most in _STAGES]
    return [cut for cut in dict.fromkeys(map(tuple, cuts)) if len(cut) <= _MOST_STAGES]


def _propose_segments(
    step: StepIndex,
    limits: Limits,
    measures: Iterable[Sequence[float]],
    cuts: Sequence[tuple[int, ...]],
) -> Iterator[tuple[SegmentRange, ...]]:
    """What takes longer to find comes later, since time may be up before."""
    for costs in measures:
        steps = []
        for starts in cuts:
            staged = cut_step(step, limits, costs, starts)
            steps.append(staged)
            for proposed in propose_patterns(staged):
                yield tuple(segment for segment in proposed if limits.allows(segment))
        solved = [staged for staged in steps if len(staged.ranges) <= _MOST_SOLVED]
        solved.sort(key=lambda staged: len(staged.ranges))
        for staged in solved:
            # Where memory is scarcer than any schedule can do with, the solver answers with one
            # that runs again what it must not: it knows that by a price only.
            yield from (found for found in _solve_chain(staged) if all(map(limits.allows, found)))
        for staged in solved:
            for proposed in propose_saved(step, limits, costs, staged):
                yield tuple(segment for segment in proposed if limits.allows(segment))


def _solve_chain(staged: StagedStep) -> Iterator[tuple[SegmentRange, ...]]:
    least, free = find_least_memory(staged.chain), keep_stages(staged.chain)
    if least is None or free is None:
        return
    most = measure_schedule(staged.chain, free).peak_bytes
    # Closer to each other where memory is scarce and a little of it is worth much.
    budgets = [least + round((most - least) * (step / _BUDGETS) ** 1.5) for step in range(_BUDGETS)]
    for solution in solve_chain(staged.chain, budgets):
        if solution is not None:
            yield staged.list_segments(solution.schedule)

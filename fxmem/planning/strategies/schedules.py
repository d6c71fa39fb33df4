"""The strategy of schedules: the step as chains of stages, solved for many budgets."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.planning.model.segments import Segments
from fxmem.planning.strategies.chains.chain import keep_stages, measure_schedule
from fxmem.planning.strategies.chains.solver import find_least_memory, solve_chain
from fxmem.planning.strategies.chains.stages import StagedStep, cut_step, list_cuts
from fxmem.planning.strategies.problem import PlanProblem

_BUDGETS = 40
_MOST_STAGES = 96
"""The chain's solver takes time in the third power of the number of stages."""


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
            yield from (s for s in _solve(staged) if all(map(limits.allows, s)))


def _solve(staged: StagedStep) -> Iterator[Segments]:
    least = find_least_memory(staged.chain)
    most, _ = measure_schedule(staged.chain, keep_stages(staged.chain))
    # Closer to each other where memory is scarce and a little of it is worth much.
    budgets = [least + round((most - least) * (at / _BUDGETS) ** 1.5) for at in range(_BUDGETS)]
    for schedule in solve_chain(staged.chain, budgets):
        if schedule is not None:
            yield staged.list_segments(schedule)

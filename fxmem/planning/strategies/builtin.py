"""The built-in strategies by their names, of which `search` is the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxmem.errors import UsageError
from fxmem.planning.model.segment_ranges import Segments
from fxmem.planning.strategies.chain import find_least_memory, measure_kept, solve_chain
from fxmem.planning.strategies.problem import PlanProblem, Proposer, Strategy, check_proposals
from fxmem.planning.strategies.small_changes import change_segments
from fxmem.planning.strategies.stages import StagedStep, cut_step, list_cuts
from fxmem.planning.strategies.whole_modules import choose_modules

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
    least, most = find_least_memory(staged.chain), measure_kept(staged.chain)
    # Closer to each other where memory is scarce.
    budgets = [least + round((most - least) * (at / _BUDGETS) ** 1.5) for at in range(_BUDGETS)]
    return map(staged.list_segments, solve_chain(staged.chain, budgets))


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

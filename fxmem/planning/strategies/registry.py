"""Strategies by their names, of which `search` is the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxmem.errors import UsageError
from fxmem.planning.model.segments import Segments
from fxmem.planning.strategies.problem import PlanProblem, Proposer, Strategy, check_proposals
from fxmem.planning.strategies.schedules import propose_schedules
from fxmem.planning.strategies.small_changes import change_segments
from fxmem.planning.strategies.whole_modules import choose_modules


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
        UsageError: There is no strategy of that name, or it is no function.
    """
    if strategy is None:
        return search
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise UsageError(f"unknown strategy {strategy!r}", hint=" or ".join(STRATEGIES))
        return STRATEGIES[strategy]
    if not callable(strategy):
        raise UsageError(
            f"strategy must be a function or a name, got {type(strategy).__name__}",
            hint=" or ".join(STRATEGIES),
        )
    return check_proposals(strategy)

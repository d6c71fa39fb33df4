"""The search for plans: many candidates, each scored on the true peak of the simulated step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxmem.planning.chain_solver import find_least_memory, solve_chain
from fxmem.planning.facts import StepFacts
from fxmem.planning.limits import Limits
from fxmem.planning.regions import Region
from fxmem.planning.simulation import simulate_regions
from fxmem.planning.stages import StagedStep, cut_step

_BUDGETS = 24


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


def score_regions(facts: StepFacts, regions: Iterable[Region], costs: Sequence[float]) -> Candidate:
    """The true peak and the cost of some regions."""
    chosen = tuple(regions)
    simulation = simulate_regions(facts, chosen)
    cost = sum(costs[index] for index in simulation.recomputed)
    return Candidate(chosen, simulation.peak_bytes, cost)


def find_front(facts: StepFacts, limits: Limits, costs: Sequence[float]) -> tuple[Candidate, ...]:
    """The best candidates found: each costs less than all that take less memory.

    Args:
        facts: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.

    Returns:
        Cheapest first; the first computes nothing again.
    """
    staged = cut_step(facts, limits, costs)
    found: dict[tuple[Region, ...], Candidate] = {}
    for regions in _propose_regions(staged):
        if regions not in found:
            found[regions] = score_regions(facts, regions, costs)
    return prune_candidates(found.values())


def prune_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both memory and cost; cheapest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.peak_bytes)):
        if not front or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return tuple(front)


def _propose_regions(staged: StagedStep) -> Iterator[tuple[Region, ...]]:
    ranges = staged.ranges
    yield ()
    for level in range(max(len(stage.options) for stage in ranges)):
        yield tuple(r for s in ranges for r in s.options[min(level, len(s.options) - 1)])
    for size in {1, 2, 3, 4, round(math.sqrt(len(ranges)))}:
        yield tuple(
            Region(ranges[i].start, ranges[min(i + size, len(ranges)) - 1].stop)
            for i in range(0, len(ranges), size)
        )
    yield from _solve_chain(staged)


def _solve_chain(staged: StagedStep) -> Iterator[tuple[Region, ...]]:
    least = find_least_memory(staged.chain)
    if least is None:
        return
    most = sum(stage.options[0].saved_bytes for stage in staged.chain.stages)
    most += max(stage.held_bytes for stage in staged.chain.stages)
    steps = range(_BUDGETS + 1)
    budgets = [int(least * (max(most, least + 1) / least) ** (i / _BUDGETS)) for i in steps]
    for solution in solve_chain(staged.chain, budgets):
        if solution is not None:
            yield staged.list_regions(solution.schedule)

"""The best of what was scored: candidates none of which another beats in memory and in cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import SegmentRange

_NEAR = 6
"""Candidates on each side of the goal that are varied, where there is a goal."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Segments with their score: one for each segments, so that it is equal to itself alone.

    Attributes:
        segments: What is computed again.
        peak_bytes: Of the whole step.
        cost: What is computed again, in the unit of the costs that were given.
    """

    segments: tuple[SegmentRange, ...]
    peak_bytes: int
    cost: float


class CandidatePool:
    """What was scored, each once, and the best of it.

    Args:
        scorer: Of the step.

    Attributes:
        found: What was scored, by its segments.
        front: The best, cheapest first.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.found: dict[tuple[SegmentRange, ...], Candidate] = {}
        self.front: tuple[Candidate, ...] = ()

    def score(self, segments: tuple[SegmentRange, ...]) -> Candidate:
        """Scores segments that may be known already."""
        candidate = self.found.get(segments)
        if candidate is None:
            candidate = Candidate(segments, *self._scorer.score(segments))
            self.found[segments] = candidate
            if is_better(candidate, self.front):
                self.front = prune_candidates((*self.front, candidate))
        return candidate


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
    """Whether nothing of a front, cheapest first, takes and costs as little."""
    at = bisect_right(front, candidate.cost, key=lambda c: c.cost)
    return at == 0 or front[at - 1].peak_bytes > candidate.peak_bytes

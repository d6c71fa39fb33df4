"""Candidates: segments with their score, and the front of those that no other beats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import Segments

_NEAR = 6
"""Candidates on each side of a goal that are varied."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Segments with their score; one object for each segments, equal to itself alone.

    Attributes:
        segments: What is recomputed.
        peak_bytes: Of the whole step.
        cost: Of what is recomputed, in the unit of the costs that were given.
    """

    segments: Segments
    peak_bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit that a plan has to keep: a search goes on near it.

    Attributes:
        peak_bytes: A budget for the peak.
        cost: A limit on the cost. Both are None where all of the front is wanted.
    """

    peak_bytes: int | None = None
    cost: float | None = None

    def choose(self, front: Sequence[Candidate]) -> Candidate:
        """Chooses the cheapest within the budget, else the leanest; or the leanest at the cost."""
        if self.peak_bytes is not None:
            return next((c for c in front if c.peak_bytes <= self.peak_bytes), front[-1])
        assert self.cost is not None
        return next((c for c in reversed(front) if c.cost <= self.cost), front[0])

    def list_near(self, front: Sequence[Candidate]) -> Sequence[Candidate]:
        """Lists the candidates of a front next to the goal; all where there is none."""
        if self.peak_bytes is not None:
            at = sum(candidate.peak_bytes > self.peak_bytes for candidate in front)
        elif self.cost is not None:
            at = sum(candidate.cost <= self.cost for candidate in front)
        else:
            return front
        return front[max(0, at - _NEAR) : at + _NEAR]


class CandidatePool:
    """All candidates that were scored, each once, and their front.

    Attributes:
        found: Candidates by their segments.
        front: Those that no other beats in both peak and cost, cheapest first.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.found: dict[Segments, Candidate] = {}
        self.front: tuple[Candidate, ...] = ()

    def score(self, segments: Segments) -> Candidate:
        """Scores segments, or finds the score that they have."""
        candidate = self.found.get(segments)
        if candidate is None:
            candidate = Candidate(segments, *self._scorer.score(segments))
            self.found[segments] = candidate
            at = bisect_right(self.front, candidate.cost, key=lambda c: c.cost)
            if at == 0 or self.front[at - 1].peak_bytes > candidate.peak_bytes:
                self.front = prune_candidates((*self.front, candidate))
        return candidate


def prune_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Drops the candidates that another beats in both peak and cost; cheapest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.peak_bytes)):
        if not front or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return tuple(front)

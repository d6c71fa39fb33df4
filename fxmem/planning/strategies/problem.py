"""The planning problem that strategies propose segments for, and the protocol of strategies.

A strategy is a function of the problem that yields segments, each time all segments of one plan.
Each plan is scored before the strategy goes on, which sees the front so far. Only scores decide.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, TypeVar

from fxmem.errors import UsageError
from fxmem.graph import ModuleCall, Node
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits, ModuleChoice
from fxmem.planning.model.recomputation import (
    SegmentRange,
    Segments,
    Span,
    iterate_segments,
    nest_spans,
)
from fxmem.planning.model.score import Scorer
from fxmem.planning.plan import Plan

SMALL_STEP_TRIALS = 400  # for each node, in steps so small that there is not more to try
LARGE_STEP_NODES = 300  # from so many on, trials take so long each that there are fewer
_NEAR = 6  # candidates on each side of a goal that are varied


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Segments with the step's peak and the cost of recomputing them; equal to itself alone."""

    segments: Segments
    peak_bytes: int
    cost: float


_Way = TypeVar("_Way", Candidate, Plan)


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit that a plan keeps, which a search goes on near; none for the whole front."""

    budget_bytes: int | None = None  # the highest peak
    overhead: float | None = None  # the highest added share of the step's time, or of its FLOPs
    by_flops: bool = False  # whether costs are FLOPs

    def choose(self, front: Sequence[Candidate]) -> Candidate:
        """Chooses the cheapest within the budget, else the leanest; or the leanest at the cost."""
        if self.budget_bytes is not None:
            return next((c for c in front if c.peak_bytes <= self.budget_bytes), front[-1])
        assert self.overhead is not None
        return next((c for c in reversed(front) if c.cost <= self.overhead), front[0])

    def list_near(self, front: Sequence[Candidate]) -> Sequence[Candidate]:
        """Lists the candidates of a front next to the goal; all where there is none."""
        if self.budget_bytes is not None:
            at = sum(candidate.peak_bytes > self.budget_bytes for candidate in front)
        elif self.overhead is not None:
            at = sum(candidate.cost <= self.overhead for candidate in front)
        else:
            return front
        return front[max(0, at - _NEAR) : at + _NEAR]


@dataclass
class PlanProblem:
    """A step to plan, as strategies see it.

    Attributes:
        step: The recorded step.
        limits: The nodes that may not be recomputed.
        costs: Of each operation, by its index: shares of the step's time, or of its FLOPs.
        other_costs: The other of the two measures.
        modules: The modules that can be recomputed as a whole.
        whole_modules: Whether segments have to be all calls of a module.
        goal: The limit that the plan is to keep.
        random: The source of all random choices; its seed is fixed.
        found: All candidates that were scored, each once, by their segments.
        front: The candidates that no other beats in both peak and cost, cheapest first; the first
            recomputes nothing.
    """

    step: StepIndex
    limits: Limits
    costs: Sequence[float]
    other_costs: Sequence[float] = ()
    modules: Sequence[ModuleChoice] = ()
    whole_modules: bool = False
    goal: Goal = field(default_factory=Goal)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    found: dict[Segments, Candidate] = field(init=False, default_factory=dict)
    front: tuple[Candidate, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.step, self.costs)
        self.score_segments(())

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of forward, in order; segments are ranges of their indices."""
        return self.step.graph.nodes[: self.step.nodes]

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls of modules with their names and nodes (``fqn``, ``start``, ``stop``)."""
        return self.step.graph.calls

    def allows(self, start: int, stop: int) -> bool:
        """Returns whether the nodes from ``start`` up to ``stop`` may be a segment."""
        if self.whole_modules:
            return any((start, stop) in choice.spans for choice in self.modules)
        return stop <= self.step.nodes and self.limits.allows(SegmentRange(start, stop))

    def score(self, segments: Iterable[SegmentRange | Span]) -> Candidate:
        """Checks segments, and scores them."""
        return self.score_segments(_check_segments(self, segments))

    def score_segments(self, segments: Segments) -> Candidate:
        """Scores segments that need no check, or finds the score that they have."""
        candidate = self.found.get(segments)
        if candidate is None:
            candidate = Candidate(segments, *self._scorer.score(segments))
            self.found[segments] = candidate
            at = bisect_right(self.front, candidate.cost, key=lambda c: c.cost)
            if at == 0 or self.front[at - 1].peak_bytes > candidate.peak_bytes:
                self.front = prune((*self.front, candidate), lambda c: c.cost)
        return candidate

    def price_runs(self, run_cost: float) -> tuple[Candidate, ...]:
        """Returns the front if segments cost something besides; the search finds more without."""

        def price(c: Candidate) -> Candidate:
            return replace(c, cost=c.cost + run_cost * len([*iterate_segments(c.segments)]))

        return prune(map(price, self.found.values()), lambda c: c.cost)

    def limit_trials(self, proposals: Iterator[Segments], trials: int) -> Iterator[Segments]:
        """Takes proposals until so many were new, or twice as many were proposed."""
        nodes = self.step.nodes
        trials = min(trials, SMALL_STEP_TRIALS * nodes, max(1, trials * LARGE_STEP_NODES // nodes))
        most = len(self.found) + trials
        for _, segments in zip(range(2 * trials), proposals, strict=False):
            yield segments
            if len(self.found) >= most:
                return


def prune(ways: Iterable[_Way], price: Callable[[_Way], float]) -> tuple[_Way, ...]:
    """Drops the ways that another beats in both peak and price; cheapest first."""
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: (price(way), way.peak_bytes)):
        if not front or way.peak_bytes < front[-1].peak_bytes:
            front.append(way)
    return tuple(front)


class Strategy(Protocol):
    """Proposes segments for a problem: for each plan all its segments, as ranges of nodes.

    A range is a pair of the first node and the node after the last; a range within another is a
    segment within a segment.
    """

    def __call__(self, problem: PlanProblem, /) -> Iterable[Iterable[SegmentRange | Span]]: ...


Proposer: TypeAlias = Callable[[PlanProblem], Iterator[Segments]]
"""A strategy whose proposals need no check."""


def run_strategy(
    problem: PlanProblem, strategy: Proposer, time_limit_s: float | None = None
) -> bool:
    """Scores what a strategy proposes; returns whether the strategy ended in time."""
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    for segments in strategy(problem):
        problem.score_segments(segments)
        if time.monotonic() > deadline:
            return False
    return True


def check_proposals(strategy: Strategy) -> Proposer:
    """Makes a strategy raise a UsageError where it proposes what cannot be the segments of a plan.

    Nodes that may not be recomputed are refused, and segments of which one crosses another.
    """

    def propose(problem: PlanProblem) -> Iterator[Segments]:
        proposals = strategy(problem)
        if proposals is None:
            raise UsageError("the strategy returned nothing", hint="yield each plan's segments")
        for proposed in proposals:
            yield _check_segments(problem, proposed)

    return propose


def _check_segments(problem: PlanProblem, proposed: Iterable[SegmentRange | Span]) -> Segments:
    try:
        given = [s if isinstance(s, SegmentRange) else SegmentRange(*s) for s in proposed]
        segments = nest_spans((s.start, s.stop) for s in iterate_segments(given))
    except TypeError:
        raise UsageError(
            f"the strategy proposed {proposed!r}",
            hint="for each plan a list of pairs: a first node and the node after the last",
        ) from None
    reason = next(_find_obstacles(problem, segments), None)
    if reason is not None:
        raise UsageError(f"the strategy proposed impossible segments: {reason}")
    return segments


def _find_obstacles(problem: PlanProblem, segments: Segments) -> Iterator[str]:
    every = [*iterate_segments(segments)]
    if problem.whole_modules:
        spans = {(segment.start, segment.stop) for segment in every}
        whole = (choice.spans for choice in problem.modules if spans >= {*choice.spans})
        if spans.difference(*whole):
            yield "whole modules are all calls of a module"
        return
    if any(child.stop > parent.stop for parent in every for child in parent.children):
        yield "segments lie apart or within each other"
    names, limits, count = problem.nodes, problem.limits, problem.step.nodes
    for start, stop in ((segment.start, segment.stop) for segment in every):
        if not 0 <= start < stop <= count:
            yield f"nodes {start} to {stop} of {count}"
        elif start in limits.starts:
            yield f"none begins with {names[start].name}: {limits.starts[start]}"
        for node in sorted({*range(start, stop)} & limits.fixed.keys()):
            yield f"{names[node].name} {limits.fixed[node]}"

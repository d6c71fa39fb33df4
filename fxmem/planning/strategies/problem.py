"""The planning problem that strategies propose segments for, and the protocol of strategies.

A strategy is a function of the problem that yields segments, each time all segments of one plan.
What it yields is scored before it goes on, so that it can look at the front that it has reached.
The score alone decides what becomes a plan.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fxmem.errors import UsageError
from fxmem.graph import ModuleCall, Node
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.modules import ModuleChoice
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import SegmentRange, Segments, Span, iterate_segments, nest_spans
from fxmem.planning.strategies.candidates import Candidate, CandidatePool, Goal

SMALL_STEP_TRIALS = 400
"""Trials for each node, in steps so small that there is not more to try."""
LARGE_STEP_NODES = 300
"""From so many nodes on, trials take so long each that there are fewer."""


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
        pool: What was scored.
    """

    step: StepIndex
    limits: Limits
    costs: Sequence[float]
    other_costs: Sequence[float] = ()
    modules: Sequence[ModuleChoice] = ()
    whole_modules: bool = False
    goal: Goal = field(default_factory=Goal)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    pool: CandidatePool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = CandidatePool(Scorer(self.step, self.costs))
        self.pool.score(())

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of forward, in order; segments are ranges of their indices."""
        return self.step.graph.nodes[: self.step.nodes]

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls of modules with their names and nodes (``fqn``, ``start``, ``stop``)."""
        return self.step.graph.calls

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The best candidates so far, cheapest first; the first recomputes nothing."""
        return self.pool.front

    def allows(self, start: int, stop: int) -> bool:
        """Tells whether the nodes from one to another, which is left out, may be a segment."""
        if self.whole_modules:
            return any((start, stop) in choice.spans for choice in self.modules)
        return stop <= self.step.nodes and self.limits.allows(SegmentRange(start, stop))

    def score(self, segments: Iterable[SegmentRange | Span]) -> Candidate:
        """Scores segments, or finds the score that they have."""
        return self.pool.score(_check_segments(self, segments))

    def limit_trials(self, proposals: Iterator[Segments], trials: int) -> Iterator[Segments]:
        """Takes proposals until so many were new, or twice as many were proposed."""
        nodes = self.step.nodes
        trials = min(trials, SMALL_STEP_TRIALS * nodes, max(1, trials * LARGE_STEP_NODES // nodes))
        most = len(self.pool.found) + trials
        for _, segments in zip(range(2 * trials), proposals, strict=False):
            yield segments
            if len(self.pool.found) >= most:
                return


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
    """Scores what a strategy proposes, until it ends.

    Args:
        problem: Whose front then has the best of it.
        strategy: Proposes segments.
        time_limit_s: When to stop all the same; None for never.

    Returns:
        Whether the strategy came to its end.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    for segments in strategy(problem):
        problem.pool.score(segments)
        if time.monotonic() > deadline:
            return False
    return True


def check_proposals(strategy: Strategy) -> Proposer:
    """Makes a user's strategy nest and check what it proposes.

    The strategy raises :class:`fxmem.errors.UsageError` where it proposes nodes that may not be
    recomputed, or segments of which one crosses another.
    """

    def propose(problem: PlanProblem) -> Iterator[Segments]:
        for proposed in strategy(problem):
            yield _check_segments(problem, proposed)

    return propose


def _check_segments(problem: PlanProblem, proposed: Iterable[SegmentRange | Span]) -> Segments:
    try:
        given = [s if isinstance(s, SegmentRange) else SegmentRange(*s) for s in proposed]
        spans = [(segment.start, segment.stop) for segment in iterate_segments(given)]
        segments = nest_spans(spans)
    except TypeError:
        raise UsageError(
            f"the strategy proposed {proposed!r}",
            hint="pairs of a first node and the node after the last",
        ) from None
    every = iterate_segments(segments)
    if problem.whole_modules:
        known = {span for choice in problem.modules for span in choice.spans}
        is_split = any(
            {*choice.spans} & {*spans} and not {*choice.spans} <= {*spans}
            for choice in problem.modules
        )
        reason = "whole modules are all calls of a module" if is_split or {*spans} - known else ""
    elif any(child.stop > parent.stop for parent in every for child in parent.children):
        reason = "segments lie apart or within each other"
    else:
        reason = next(filter(None, (_find_obstacle(problem, *span) for span in spans)), "")
    if reason:
        raise UsageError(f"the strategy proposed segments that cannot be: {reason}")
    return segments


def _find_obstacle(problem: PlanProblem, start: int, stop: int) -> str:
    """Finds why nodes cannot be a segment; empty where they can."""
    names, limits = problem.nodes, problem.limits
    if not 0 <= start < stop <= problem.step.nodes:
        return f"nodes {start} to {stop} of {problem.step.nodes}"
    if start in limits.starts:
        return f"none begins with {names[start].name}: {limits.starts[start]}"
    fixed = next((node for node in range(start, stop) if node in limits.fixed), None)
    return "" if fixed is None else f"{names[fixed].name} {limits.fixed[fixed]}"

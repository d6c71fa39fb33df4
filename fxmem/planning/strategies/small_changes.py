"""The strategy of small changes to the best segments, drawn at random."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.recomputation import SegmentRange, Segments
from fxmem.planning.strategies.problem import Goal, PlanProblem
from fxmem.planning.strategies.stages import list_cuts

_TRIALS = 11000
_TRIALS_NEAR = 9000  # next to a goal
_TRIALS_ELSEWHERE = 6500  # between those
_ROUNDS = 2  # of looking elsewhere, and near the goal again
_MOST_STAGES = 8  # that a new segment spans
# Shares of random choices:
_AT_GAPS = 0.9  # vary a plan beside a gap in the front, rather than any
_JOINED = 0.4  # put two plans together
_JOINED_NEAR = 0.3  # the same next to a goal: neighbours only
_FURTHER = 0.3  # make one more change: some only pay together
_AT_STAGES = 0.6  # cut where stages begin
_WITHIN = 0.3  # change what lies within a segment


def change_segments(problem: PlanProblem) -> Iterator[Segments]:
    """Changes the best candidates: all of the front, or those next to the goal."""
    yield from _change_near(problem)
    for candidate in problem.front:  # segments without which the peak is no higher
        segments = candidate.segments
        for segment in segments:
            fewer = tuple(s for s in segments if s is not segment)
            yield fewer
            if problem.score_segments(fewer).peak_bytes <= candidate.peak_bytes:
                segments = fewer


def _change_near(problem: PlanProblem) -> Iterator[Segments]:
    cuts = list_cuts(problem.step, problem.limits)
    positions = sorted({start for starts in cuts for start in starts})
    goal = problem.goal
    if goal.budget_bytes is None and goal.overhead is None:
        yield from problem.limit_trials(_vary_front(problem, positions, goal), _TRIALS)
        return
    near = _vary_front(problem, positions, goal, is_near=True)
    yield from problem.limit_trials(near, _TRIALS_NEAR)
    for _ in range(_ROUNDS):
        before = goal.choose(problem.front)
        # A better plan may be reached from elsewhere.
        everywhere = _vary_front(problem, positions, Goal())
        yield from problem.limit_trials(everywhere, _TRIALS_ELSEWHERE)
        yield from problem.limit_trials(near, _TRIALS_NEAR)
        if goal.choose(problem.front) is before:
            return


def _vary_front(
    problem: PlanProblem, positions: Sequence[int], goal: Goal, is_near: bool = False
) -> Iterator[Segments]:
    """Varies candidates next to a goal; without one, most often those beside a gap in the front."""
    rng = problem.random
    while True:
        near = goal.list_near(problem.front)
        at = rng.randrange(len(near))
        if not is_near and rng.random() < _AT_GAPS:
            # A peak drawn at random lies in a wide gap more often than in a narrow one, and below
            # all of them now and then.
            most, least = near[0].peak_bytes, near[-1].peak_bytes
            peak_bytes = most * (least / most) ** (1.1 * rng.random())
            at = bisect_left(near, -peak_bytes, key=lambda candidate: -candidate.peak_bytes)
            at = min(max(at - rng.randrange(2), 0), len(near) - 1)
        parents = [candidate.segments for candidate in near]
        yield vary_segments(rng, parents, at, positions, problem.step, problem.limits, is_near)


def vary_segments(
    rng: Random,
    parents: Sequence[Segments],
    at: int,
    positions: Sequence[int],
    step: StepIndex,
    limits: Limits,
    is_near: bool = False,
) -> Segments:
    """Draws a variation of the plan at an index, or of two put together.

    Segments are cut at the positions given, where stages begin, most of the time. A variation
    that is not allowed is dropped for the plan itself.
    """
    parent = parents[at]
    if rng.random() < (_JOINED_NEAR if is_near else _JOINED) and len(parents) > 1:
        near = draw_neighbour(rng, at, len(parents))
        other = parents[near if is_near or rng.random() < 0.5 else rng.randrange(len(parents))]
        cut = rng.choice(positions)
        before = tuple(segment for segment in parent if segment.stop <= cut)
        changed = before + tuple(segment for segment in other if segment.start >= cut)
    else:
        cuts = positions if rng.random() < _AT_STAGES else range(positions[0], step.nodes)
        changed = _change(rng, parent, cuts, step.nodes)
        while rng.random() < _FURTHER:
            changed = _change(rng, changed, cuts, step.nodes)
    return changed if all(map(limits.allows, changed)) else parent


def draw_neighbour(rng: Random, at: int, count: int) -> int:
    """Draws a position one or two before or after another, of as many as there are."""
    return max(0, min(count - 1, at + rng.choice((-2, -1, 1, 2))))


def _change(rng: Random, segments: Segments, cuts: Sequence[int], nodes: int) -> Segments:
    """Makes one change among some segments, or among those within one of them."""
    if segments and rng.random() < _WITHIN:
        at = rng.randrange(len(segments))
        segment = segments[at]
        within = [cut for cut in cuts if segment.start <= cut < segment.stop]
        if len(within) > 1:
            children = _change(rng, segment.children, within, segment.stop)
            children = tuple(c for c in children if c.stop - c.start < segment.stop - segment.start)
            return (*segments[:at], replace(segment, children=children), *segments[at + 1 :])
    kind = rng.randrange(7)
    if kind == 0 or not segments:
        return _add(rng, segments, cuts, nodes)
    at = rng.randrange(len(segments))
    before, segment, after = segments[:at], segments[at], segments[at + 1 :]
    if kind == 1:
        return (*before, *segment.children, *after)
    if kind == 2 and after:  # with the next
        return (*before, SegmentRange(segment.start, after[0].stop, segment.children), *after[1:])
    inside = [cut for cut in cuts if segment.start < cut < segment.stop]
    if kind == 3 and inside:
        cut = rng.choice(inside)
        return (*before, SegmentRange(segment.start, cut), SegmentRange(cut, segment.stop), *after)
    low = before[-1].stop if before else cuts[0]
    high = after[0].start if after else nodes
    start, stop = segment.start, segment.stop
    if kind == 4:
        start = _step(rng, cuts, start, low, stop - 1)
    else:
        stop = _step(rng, [*cuts, nodes], stop, start + 1, high)
    if kind == 6 and stop > segment.stop:
        return (*before, SegmentRange(start, stop, (segment,)), *after)
    return (*before, _cover(start, stop, segment.children), *after)


def _add(rng: Random, segments: Segments, cuts: Sequence[int], nodes: int) -> Segments:
    """Adds a segment; the segments that it covers become its children, or go."""
    start = rng.choice(cuts)
    at = bisect_left(cuts, start)
    reach = rng.randint(at + 1, min(at + _MOST_STAGES, len(cuts)))
    stop = cuts[reach] if reach < len(cuts) else nodes
    inner = segments if rng.random() < 0.5 else ()
    rest = [r for r in segments if r.stop <= start or r.start >= stop]
    return tuple(sorted([*rest, _cover(start, stop, inner)], key=lambda r: r.start))


def _cover(start: int, stop: int, segments: Segments) -> SegmentRange:
    """Makes a segment whose children are the given segments that it covers."""
    children = tuple(
        c
        for c in segments
        if start <= c.start and c.stop <= stop and c.stop - c.start < stop - start
    )
    return SegmentRange(start, stop, children)


def _step(rng: Random, cuts: Sequence[int], value: int, low: int, high: int) -> int:
    """Draws a position a little before or after one, between two others."""
    return max(low, min(high, cuts[draw_neighbour(rng, bisect_left(cuts, value), len(cuts))]))

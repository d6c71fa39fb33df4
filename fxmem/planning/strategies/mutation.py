"""Small changes to a plan's segments, drawn at random."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import replace

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.modules import Span, nest_spans
from fxmem.planning.model.segments import SegmentRange, iterate_segments

Segments = tuple[SegmentRange, ...]
_MOST_STAGES = 8
"""That a new segment spans."""
_MODULES = 0.05
"""How often whole modules are what is changed."""
_JOINED = 0.4
"""How often two plans are put together."""
_JOINED_NEAR = 0.3
"""Likewise where changes are to be small: neighbours only."""
_FURTHER = 0.3
"""How often one more change follows: some only pay together."""
_AT_STAGES = 0.6
"""How often cuts are drawn where stages begin."""
_WITHIN = 0.3
"""How often what lies within a segment is what is changed."""


def mutate_segments(
    rng: random.Random,
    parents: Sequence[Segments],
    positions: Sequence[int],
    groups: Sequence[Sequence[Sequence[Span]]],
    step: StepIndex,
    limits: Limits,
    is_near: bool = False,
) -> Segments:
    """A variation of one of some plans, or two of them put together.

    Args:
        rng: Where chance comes from.
        parents: The plans.
        positions: Where stages begin: cuts are drawn there most of the time.
        groups: Calls of modules, by module, of those that are alike.
        step: The step.
        limits: What may not be computed again.
        is_near: Whether the change is to be a small one.

    Returns:
        Segments that may be computed again; the same as a parent's where no change was possible.
    """
    at = rng.randrange(len(parents))
    parent = parents[at]
    if groups and not is_near and rng.random() < _MODULES:
        changed = _toggle_modules(rng, parent, groups)
    elif rng.random() < (_JOINED_NEAR if is_near else _JOINED) and len(parents) > 1:
        near = draw_neighbour(rng, at, len(parents))
        other = parents[near if is_near or rng.random() < 0.5 else rng.randrange(len(parents))]
        changed = join_segments(parent, other, rng.choice(positions))
    else:
        is_stage = rng.random() < _AT_STAGES
        cuts = positions if is_stage else range(positions[0], step.nodes)
        changed = _change(rng, parent, cuts, step.nodes)
        while rng.random() < _FURTHER:
            changed = _change(rng, changed, cuts, step.nodes)
    return changed if all(map(limits.allows, changed)) else parent


def draw_neighbour(rng: random.Random, at: int, count: int) -> int:
    """A position one or two before or after another, of as many as there are.

    Args:
        rng: Where chance comes from.
        at: The other.
        count: How many positions there are, from 0 on.
    """
    return max(0, min(count - 1, at + rng.choice((-2, -1, 1, 2))))


def join_segments(head: Segments, tail: Segments, position: int) -> Segments:
    """The segments of one plan before a position, and those of another after it.

    Args:
        head: Those of the one.
        tail: Those of the other.
        position: A node.
    """
    before = tuple(segment for segment in head if segment.stop <= position)
    after = tuple(segment for segment in tail if segment.start >= position)
    return before + after


def _toggle_modules(
    rng: random.Random, segments: Segments, groups: Sequence[Sequence[Sequence[Span]]]
) -> Segments:
    """Calls of some modules that are alike come to be segments, or no longer are."""
    group = rng.choice(groups)
    at = rng.randrange(len(group))
    spans = {span for module in group[at : rng.randint(at + 1, len(group))] for span in module}
    known = {(segment.start, segment.stop) for segment in iterate_segments(segments)}
    return lay_spans(known - spans, spans - known)


def lay_spans(spans: Set[Span], others: Set[Span]) -> Segments:
    """Segments of spans that lie apart or within each other, without those that others cross.

    Args:
        spans: Of which none crosses another.
        others: Likewise.

    >>> [(r.start, r.stop, len(r.children)) for r in lay_spans({(0, 4), (5, 6)}, {(3, 8)})]
    [(3, 8, 1)]
    """
    around: list[Span] = []
    crossed = set()
    for span in sorted(spans | others, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= span[0]:
            around.pop()
        while around and around[-1][1] < span[1] and span in others:
            crossed.add(around.pop())
        if around and around[-1][1] < span[1]:
            crossed.add(span)
        else:
            around.append(span)
    return nest_spans((spans | others) - crossed)


def _change(rng: random.Random, segments: Segments, cuts: Sequence[int], nodes: int) -> Segments:
    """One change among some segments, or among those within one of them."""
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
    return (*before, _reshape(segment, start, stop), *after)


def _add(rng: random.Random, segments: Segments, cuts: Sequence[int], nodes: int) -> Segments:
    """A new segment; those that it covers come to lie within it, or go."""
    start = rng.choice(cuts)
    at = bisect_left(cuts, start)
    reach = rng.randint(at + 1, min(at + _MOST_STAGES, len(cuts)))
    stop = cuts[reach] if reach < len(cuts) else nodes
    inner = tuple(r for r in segments if start <= r.start and r.stop <= stop)
    inner = inner if rng.random() < 0.5 else ()
    inner = tuple(r for r in inner if (r.start, r.stop) != (start, stop))
    rest = [r for r in segments if r.stop <= start or r.start >= stop]
    return tuple(sorted([*rest, SegmentRange(start, stop, inner)], key=lambda r: r.start))


def _step(rng: random.Random, cuts: Sequence[int], value: int, low: int, high: int) -> int:
    """A position a little before or after one, between two others."""
    return max(low, min(high, cuts[draw_neighbour(rng, bisect_left(cuts, value), len(cuts))]))


def _reshape(segment: SegmentRange, start: int, stop: int) -> SegmentRange:
    children = tuple(c for c in segment.children if start <= c.start and c.stop <= stop)
    children = tuple(c for c in children if (c.start, c.stop) != (start, stop))
    return SegmentRange(start, stop, children)

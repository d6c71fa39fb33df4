"""Spans of modules laid over others: what crosses goes, all else lies within or apart."""

from __future__ import annotations

import random
from itertools import pairwise

from fxmem.planning.model.segments import SegmentRange, iterate_segments
from fxmem.planning.strategies.mutation import lay_spans

Span = tuple[int, int]


def draw_spans(rng: random.Random) -> set[Span]:
    """Spans of which none crosses another."""
    spans: set[Span] = set()
    for _ in range(8):
        start = rng.randrange(19)
        span = start, rng.randint(start + 1, 20)
        if not any(cross(span, other) for other in spans):
            spans.add(span)
    return spans


def cross(one: Span, other: Span) -> bool:
    first, second = sorted((one, other))
    return first[0] < second[0] < first[1] < second[1]


def check_nested(regions: tuple[SegmentRange, ...], low: int, high: int) -> None:
    for before, after in pairwise(regions):
        assert before.stop <= after.start
    for region in regions:
        assert low <= region.start < region.stop <= high
        check_nested(region.children, region.start, region.stop)


def test_spans_are_laid_over_those_they_cross() -> None:
    rng = random.Random(0)
    for _ in range(300):
        spans, others = draw_spans(rng), draw_spans(rng)
        regions = lay_spans(spans, others)
        check_nested(regions, 0, 20)
        kept = {span for span in spans if not any(cross(span, other) for other in others)}
        assert {(r.start, r.stop) for r in iterate_segments(regions)} == kept | others

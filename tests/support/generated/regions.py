"""Regions at random that may be computed again, nested ones too."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits, find_limits
from fxmem.planning.model.recomputation import SegmentRange


def draw_regions(
    rng: random.Random, limits: Limits, start: int, stop: int, depth: int = 0
) -> Iterator[SegmentRange]:
    """Regions at random that may be computed again."""
    at = start
    while at < stop:
        end = min(stop, at + rng.randint(1, max(1, (stop - start) // (2 if depth else 1))))
        free = not any(node in limits.fixed for node in range(at, end))
        if rng.random() < 0.7 and free and at not in limits.starts:
            deeper = depth < 2 and rng.random() < 0.5
            inner = tuple(draw_regions(rng, limits, at, end, depth + 1)) if deeper else ()
            if all(child.stop - child.start < end - at for child in inner):
                yield SegmentRange(at, end, inner)
        at = end


def draw_plan(name: str, seed: int, facts: StepIndex) -> tuple[SegmentRange, ...]:
    rng = random.Random(f"{name} {seed}")
    placeholders = sum(node.op == "placeholder" for node in facts.graph.nodes)
    return tuple(draw_regions(rng, find_limits(facts), placeholders, facts.nodes))

"""Regions that the integer program over segments proposes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planned_models import PLANNED

from fxmem import analyze
from fxmem.planning.model.index import build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.score import Scorer
from fxmem.planning.strategies.segment_program import propose_saved
from fxmem.planning.strategies.stages import cut_step, find_boundaries


@pytest.mark.parametrize("name", ["attention", "unet"])
def test_proposals_are_apart_in_order_and_take_less_memory(name: str) -> None:
    make, spec = PLANNED[name]
    facts = build_index(analyze(make(), (spec,), device="cpu").graph, counts_host=True)
    limits = find_limits(facts)
    costs = [1.0] * len(facts.graph.operations)
    staged = cut_step(facts, limits, costs, find_boundaries(facts, limits))
    scorer = Scorer(facts, costs)
    plain, _ = scorer.score(())
    peaks = []
    for regions in propose_saved(facts, limits, costs, staged):
        assert all(map(limits.allows, regions))
        assert all(a.stop <= b.start for a, b in pairwise(regions))
        peaks.append(scorer.score(regions)[0])
    assert min(peaks) < plain

"""The fast score of a plan against the simulated step, and the bound below it."""

from __future__ import annotations

import pytest
from generated.regions import draw_plan
from planned_models import PLANNED

from fxmem import analyze
from fxmem.planning.model.index import build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.strategies.bound import bound_cost


@pytest.mark.parametrize(
    ("device", "autocast"),
    [("cpu", None), ("cuda", None), ("cpu", "bf16")],
    ids="cpu cuda bf16".split(),
)
@pytest.mark.parametrize("name", PLANNED)
def test_score_is_that_of_the_simulated_step_and_the_bound_is_below(
    name: str, device: str, autocast: str | None
) -> None:
    make, spec = PLANNED[name]
    graph = analyze(make(), (spec,), device=device, autocast=autocast).graph
    facts = build_index(graph)
    costs = [float(index % 7) for index in range(len(graph.operations))]
    scorer, limits = Scorer(facts, costs), find_limits(facts)
    for seed in range(20):
        regions = draw_plan(name, seed, facts)
        simulation = simulate_segments(facts, regions)
        cost = sum(costs[index] for index in simulation.recomputed)
        assert scorer.score(regions) == (max(simulation.live_bytes), cost), regions
        assert scorer.score(regions) == (max(simulation.live_bytes), cost), "the second time too"
        assert bound_cost(facts, limits, costs, max(simulation.live_bytes)) <= cost + 1e-6

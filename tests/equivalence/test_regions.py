"""Regions under checkpoints: the memory that was promised."""

from __future__ import annotations

import pytest
import torch
from generated.regions import draw_plan
from leanest import build_module
from planned_models import PLANNED
from torch import nn

from fxmem import analyze
from fxmem.graph import MemoryGraph, Phase
from fxmem.memory.timeline import build_timeline
from fxmem.planning.model.index import build_index
from fxmem.planning.model.recomputation import SegmentRange
from fxmem.planning.model.simulate import build_graph, simulate_segments
from fxmem.planning.prepared_step import describe_segments

SEEDS = range(6)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PLANNED[name][0]()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PLANNED)
def test_the_rewritten_step_takes_what_was_computed(name: str, device: str) -> None:
    model, spec = make_model(name), PLANNED[name][1]
    analysis = analyze(model, (spec,), device=device)
    assert analysis.frontend == "fx"
    facts = build_index(analysis.graph)
    for seed in SEEDS:
        regions = draw_plan(name, seed, facts)
        simulation = simulate_segments(facts, regions)
        planned = build_module(model, analysis.fx_graph, describe_segments(facts, regions))
        recorded = analyze(planned, (spec,), device=device)
        peak_bytes = max(build_timeline(recorded.graph).profile())
        # What a function takes out of a region goes a moment before the sum of its bias.
        assert peak_bytes <= max(simulation.live_bytes) <= peak_bytes * 1.00002, regions


def test_what_a_module_that_does_nothing_takes_is_an_input_of_its_region() -> None:
    """The sum is saved in the first region alone, and the second holds it for its shortcut."""
    model, spec = make_model("shortcuts"), PLANNED["shortcuts"][1]
    analysis = analyze(model, (spec,), device="cpu")
    facts = build_index(analysis.graph)
    at = {node.name: node.index for node in analysis.nodes}
    regions = (
        SegmentRange(at["add"], at["norms.1"]),
        SegmentRange(at["norms.1"], at["shortcuts.1"] + 1),
    )
    segments = describe_segments(facts, regions)
    recorded = analyze(build_module(model, analysis.fx_graph, segments), (spec,), device="cpu")
    promised = build_graph(simulate_segments(facts, regions))
    assert measure_turn(promised) == measure_turn(recorded.graph)


def measure_turn(graph: MemoryGraph) -> int:
    """Sums the bytes alive when backward begins."""
    turn = next(o.index for o in graph.operations if o.phase is Phase.BACKWARD)
    return build_timeline(graph).profile()[turn]

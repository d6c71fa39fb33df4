"""Plans at random for modules that Hypothesis writes: the memory promised, the same numbers.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

import random

import pytest
from generated.modules import Program, programs, runs
from generated.regions import draw_regions
from generated.steps import analyse, is_in_graph, is_promise_kept, uses_all_values
from hypothesis import assume, given
from hypothesis import strategies as st
from leanest import build_module
from steps import are_equal, take_step
from trials import try_examples

import fxmem
from fxmem.memory.timeline import build_timeline
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.recomputation import SegmentRange, iterate_segments
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.prepared_step import describe_segments

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore")  # what programs do is theirs
STRICT = try_examples(40, are_slow=True)


def is_idle(facts: StepIndex, region: SegmentRange) -> bool:
    """Returns whether backward needs nothing of a region, which no plan then computes again."""
    nodes = range(region.start, region.stop)
    return not any(s.unpacked is not None for node in nodes for s in facts.saves_by_node[node])


def draw_plan(seed: int, facts: StepIndex) -> tuple[SegmentRange, ...]:
    placeholders = sum(node.op == "placeholder" for node in facts.graph.nodes)
    limits = find_limits(facts)
    drawn = draw_regions(random.Random(seed), limits, placeholders, facts.nodes)
    return tuple(
        region
        for region in drawn
        if not any(is_idle(facts, inner) for inner in iterate_segments([region]))
    )


@STRICT
@given(programs(most=10), st.integers(0, 2**20))
def test_a_planned_module_keeps_its_promise(program: Program, seed: int) -> None:
    assume(runs(program) and is_in_graph(program))
    analysis = analyse(program)
    assume(analysis.frontend == "fx" and uses_all_values(analysis))
    facts = build_index(analysis.graph)
    regions = draw_plan(seed, facts)
    assume(regions)
    limits = find_limits(facts)
    assert all(map(limits.allows, regions))
    segments = describe_segments(facts, regions)

    case = program.case()
    args, plain = case.inputs()[0], case.model()
    planned = build_module(case.model(), analysis.fx_graph, segments)
    for _ in range(STEPS):  # what one leaves in buffers, the next finds
        assert are_equal(take_step(plain, args), take_step(planned, args)), regions

    planned = build_module(case.model(), analysis.fx_graph, segments)
    recorded = fxmem.analyze(planned, args, device="cpu")
    promised_bytes = max(simulate_segments(facts, regions).live_bytes)
    recorded_bytes = max(build_timeline(recorded.graph).profile())
    assert is_promise_kept(promised_bytes, recorded_bytes), regions

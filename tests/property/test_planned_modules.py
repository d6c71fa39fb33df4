"""Plans at random for modules that Hypothesis writes: the memory promised, the same numbers.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator

import pytest
from drawn_regions import draw_regions
from generated_modules import Program, programs, runs
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from steps import are_equal, take_step
from torch import nn

from fxmem import analyze
from fxmem.analysis import Analysis
from fxmem.planning.describe import describe_segments
from fxmem.planning.facts import StepFacts, gather_facts
from fxmem.planning.limits import find_limits
from fxmem.planning.regions import Region, iterate_regions
from fxmem.planning.simulation import simulate_regions
from fxmem.timeline import build_timeline
from fxmem.transform.checkpointing import build_module

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))
STEPS = 3
STRICT = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the generated programs do is theirs: PyTorch warns of some of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def analyse(model: nn.Module, program: Program) -> Analysis:
    return analyze(model, program.case().inputs()[0], device="cpu")


def is_idle(facts: StepFacts, region: Region) -> bool:
    """Whether backward needs nothing of a region, which no plan then computes again."""
    nodes = range(region.start, region.stop)
    return not any(s.unpacked is not None for node in nodes for s in facts.saves_by_node[node])


def draw_plan(seed: int, facts: StepFacts) -> tuple[Region, ...]:
    placeholders = sum(node.op == "placeholder" for node in facts.graph.nodes)
    limits = find_limits(facts)
    drawn = draw_regions(random.Random(seed), limits, placeholders, facts.nodes)
    return tuple(
        region
        for region in drawn
        if not any(is_idle(facts, inner) for inner in iterate_regions([region]))
    )


@STRICT
@given(programs(most=10), st.integers(0, 2**20))
def test_a_planned_module_keeps_its_promise(program: Program, seed: int) -> None:
    # What is kept on the module is no part of the graph; fakes of inputs keep a changed shape.
    assume(runs(program))
    assume(not any(word in program.source for word in ("kept", "unsqueeze_(", ".t_(")))
    model = program.case().model()
    analysis = analyse(model, program)
    assume(analysis.frontend == "fx")
    facts = gather_facts(analysis.graph, counts_host=True)
    # The user's function holds dead values to its end, and the planned module does not.
    assume(all(save.unpacked is not None for save in analysis.graph.saves))
    regions = draw_plan(seed, facts)
    assume(regions)
    limits = find_limits(facts)
    assert all(map(limits.allows, regions))
    segments = describe_segments(facts, regions, [0.0] * len(analysis.graph.operations))

    args = program.case().inputs()[0]
    plain, planned = program.case().model(), build_module(model, analysis.fx_graph, segments)
    for _ in range(STEPS):  # what one leaves in buffers, the next finds
        assert are_equal(take_step(plain, args), take_step(planned, args)), regions

    planned = build_module(program.case().model(), analysis.fx_graph, segments)
    recorded = max(build_timeline(analyse(planned, program).graph).profile())
    promised = simulate_regions(facts, regions).peak_bytes
    # Here and there a few numbers go a moment earlier: the sum of a bias, the mean of a row.
    assert recorded <= promised <= recorded * 1.0001 + 64, regions

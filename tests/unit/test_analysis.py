from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from hand_made import MIB, add_first_step, make_analysis, make_graph, memory_graphs
from hypothesis import given

from fxmem.analysis import FirstStep
from fxmem.graph import RESIDENT, Category, FirstOperation, MemoryGraph, Phase, Storage


def test_the_numbers_of_the_hand_made_step() -> None:
    analysis = make_analysis()
    assert analysis.first_step is analysis.to_dict()["first_step"] is None
    assert analysis.peak_bytes == analysis.reserved_bytes == 30 * MIB + 4
    assert analysis.parameter_bytes == 8 * MIB
    assert analysis.buffer_bytes == MIB
    assert analysis.input_bytes == 2 * MIB
    assert analysis.gradient_bytes == 4 * MIB
    assert analysis.optimizer_state_bytes == 2 * MIB
    assert analysis.saved_bytes == 4 * MIB
    assert len(analysis.saved) == 3
    assert (analysis.forward_flops, analysis.backward_flops) == (4_000_000, 4_000_000)
    assert analysis.breakdown[Category.WORKSPACE] == 4 * MIB
    assert analysis.frontend == "fx"


def test_a_gradient_that_the_step_replaces_counts_once() -> None:
    graph = make_graph()
    old = Storage(
        14, 4 * MIB, Category.GRADIENT, "fc2.weight", (8, 1024), "float32", RESIDENT, died=5
    )
    graph = dataclasses.replace(graph, storages=(*graph.storages, old))
    assert make_analysis(graph).gradient_bytes == 4 * MIB


def test_json_is_stable(check_golden: Callable[[str, str], None]) -> None:
    check_golden("hand_made.json", make_analysis().to_json(indent=2) + "\n")


@given(memory_graphs())
def test_the_dict_is_that_of_the_json_and_its_sums_agree(graph: MemoryGraph) -> None:
    analysis = make_analysis(graph)
    result = analysis.to_dict()
    assert json.loads(analysis.to_json()) == result
    live = sum(result["storages"][index]["nbytes"] for index in result["peak"]["live"])
    assert sum(result["breakdown"].values()) == result["peak_bytes"]
    assert live + result["peak"]["workspace_bytes"] == result["peak_bytes"]
    assert max(result["timeline"]["live_bytes"]) == result["peak_bytes"]


@pytest.mark.parametrize(
    ("state_mib", "mib", "phase", "node"),
    [(1, 19, Phase.FORWARD, "block.relu"), (30, 43, Phase.OPTIMIZER, None)],
)
def test_the_first_step_peaks_where_most_is_in_use(
    state_mib: int, mib: int, phase: Phase, node: str | None
) -> None:
    analysis = make_analysis(add_first_step(make_graph(), state_mib))
    source = next((n.source for n in analysis.nodes if n.name == node), None)
    expected = FirstStep(*(mib * MIB,) * 3, phase, node, source)
    assert analysis.first_step == expected
    assert analysis.to_dict()["first_step"]["peak_bytes"] == mib * MIB


def test_the_first_step_of_a_model_that_runs_nothing_is_its_move() -> None:
    graph = dataclasses.replace(make_graph(), warmup=((0, 4 * MIB),))
    # What nobody saw being allocated was there before all else.
    expected = FirstStep(*(13 * MIB,) * 3, Phase.FORWARD, None, None)
    assert make_analysis(graph).first_step == expected
    late = FirstOperation(1, Phase.FORWARD, 2)
    graph = dataclasses.replace(graph, first_operations=(late,))
    assert make_analysis(graph).first_step == expected

from __future__ import annotations

from hand_made import MIB, make_graph, memory_graphs
from hypothesis import given

from fxmem.graph import Category, MemoryGraph, Phase
from fxmem.memory.liveness import build_profile, find_live, list_category_bytes
from fxmem.memory.timeline import build_timeline


def test_the_peak_is_where_the_hand_made_table_has_it() -> None:
    graph = make_graph()
    peak = build_profile(graph, build_timeline(graph)).peak
    assert peak.nbytes == 30 * MIB + 4
    assert (peak.step, peak.phase, peak.node) == (5, Phase.BACKWARD, graph.nodes[2])
    assert str(peak.source) == "net.py:12"
    assert peak.workspace_bytes == 4 * MIB
    assert [s.index for s in peak.live] == [0, 1, 7, 10, 11, 3, 4, 2, 8, 9]


def test_a_peak_in_no_node_has_no_source() -> None:
    graph = make_graph()
    graph = MemoryGraph((), (), graph.operations[:1], ())
    peak = build_profile(graph, build_timeline(graph)).peak
    assert (peak.nbytes, peak.node, peak.source, peak.live) == (0, None, None, ())


def test_a_storage_is_alive_from_the_operation_that_made_it_to_its_last() -> None:
    graph = make_graph()
    alive = [step for step in range(8) if graph.storages[7] in find_live(graph, step)]
    assert alive == [2, 3, 4, 5, 6]


@given(memory_graphs())
def test_any_peak_is_the_first_highest_step_and_the_sum_of_what_is_alive(
    graph: MemoryGraph,
) -> None:
    profile = build_profile(graph, build_timeline(graph))
    peak = profile.peak
    assert sum(profile.breakdown.values()) == peak.nbytes == max(profile.live_bytes)
    assert sum(s.nbytes for s in peak.live) + peak.workspace_bytes == peak.nbytes
    assert all(n < peak.nbytes for n in profile.live_bytes[: peak.step])
    keys = [(-s.nbytes, s.index) for s in peak.live]
    assert keys == sorted(keys)
    sums = [sum(column) for column in zip(*list_category_bytes(graph).values(), strict=True)]
    assert tuple(sums) == profile.live_bytes


def test_bytes_of_categories_are_those_of_the_hand_made_table() -> None:
    series = list_category_bytes(make_graph())
    assert [n // MIB for n in series[Category.ACTIVATION]] == [0, 0, 4, 4, 4, 4, 4, 0]
    assert [n // MIB for n in series[Category.TEMPORARY]] == [0, 4, 4, 0, 0, 4, 7, 1]
    assert [n // MIB for n in series[Category.WORKSPACE]] == [0, 0, 0, 0, 0, 4, 0, 0]
    assert set(series[Category.PARAMETER]) == {8 * MIB}

from __future__ import annotations

import networkx
from hand_made import MIB, make_analysis, memory_graphs
from hypothesis import given, settings

from fxmem.graph import MemoryGraph


def test_nodes_have_their_memory_and_edges_the_storages_that_flow() -> None:
    graph = make_analysis().to_networkx()
    assert graph.graph == {
        "model": "nets/net.py:Net",
        "peak_bytes": 30 * MIB + 4,
        "phase": "backward",
    }
    assert list(graph.edges) == [("fc1", "block.relu")]
    relu = graph.nodes["block.relu"]
    assert (relu["target"], relu["shape"], relu["dtype"]) == ("relu", (8, 1024), "float32")
    assert relu["source"] == "/home/me/nets/net.py:12"
    assert (relu["saved_bytes"], relu["live_at_peak_bytes"]) == (4 * MIB, 12 * MIB)
    assert [name for name, is_peak in graph.nodes(data="is_peak") if is_peak] == ["block.relu"]


@settings(max_examples=20)
@given(memory_graphs())
def test_any_graph_is_acyclic_and_has_every_node(graph: MemoryGraph) -> None:
    digraph = make_analysis(graph).to_networkx()
    assert list(digraph) == [node.name for node in graph.nodes]
    assert networkx.is_directed_acyclic_graph(digraph)

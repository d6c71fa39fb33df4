"""Times questions about the graph of a step, asked of networkx and of fxmem's own code.

    python -m benchmarks.graph_questions [--layers 96]

The graph is that of a transformer's training step, in which skips lead around attention and MLP.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import networkx
from tabulate import tabulate

import fxmem
from examples.planner_nets import PlainGPT
from fxmem.planning.model.index import build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.strategies.stages import find_boundaries
from fxmem.report.document import build_document
from fxmem.report.graph.tree import Tree, fold_repeats, grow_tree, list_nodes

_Found = TypeVar("_Found")
_ROUNDS = 5


def measure(ask: Callable[[], _Found]) -> tuple[float, _Found]:
    """Asks a question, and returns the shortest time in milliseconds and the answer."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        answer = ask()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), answer


def compare(layers: int) -> str:
    """Compares both ways to ask, as a table."""
    analysis = fxmem.analyze(PlainGPT(layers, 32), ("1x32:int64",), optimizer="adamw")
    step = build_index(analysis.allocated_graph)
    limits = find_limits(step)
    nodes = analysis.nodes[: step.nodes]
    rows = build_document(analysis).nodes
    tree = grow_tree(rows)
    trees = [item for item in tree.children if isinstance(item, Tree)]
    blocks = next(item for item in trees if item.names == ("blocks",))
    graph: networkx.DiGraph[int] = networkx.DiGraph(
        (tail, node.index) for node in nodes for tail in node.inputs
    )
    labels = {node.index: repr((node.target, node.shape)) for node in nodes}
    networkx.set_node_attributes(graph, labels, "label")

    def find_dominators() -> list[int]:
        dominators = networkx.immediate_dominators(graph, 0)
        found, node = [], step.nodes - 1
        while dominators.get(node, node) != node:
            node = dominators[node]
            found.append(node)
        return found

    def match_blocks() -> int:
        parts = [graph.subgraph(list_nodes(block)) for block in blocks.children]
        match = networkx.isomorphism.categorical_node_match("label", "")
        return 1 + sum(not networkx.is_isomorphic(a, b, match) for a, b in pairwise(parts))

    def hash_blocks() -> int:
        parts = (graph.subgraph(list_nodes(block)).to_undirected() for block in blocks.children)
        return len({networkx.weisfeiler_lehman_graph_hash(p, node_attr="label") for p in parts})

    asked: list[tuple[str, str, tuple[float, object]]] = [
        ("where stages begin", "networkx: dominators", measure(lambda: len(find_dominators()))),
        (
            "where stages begin",
            "fxmem: bytes across",
            measure(lambda: len(find_boundaries(step, limits, step.nodes))),
        ),
        ("equal blocks", "networkx: isomorphism", measure(match_blocks)),
        ("equal blocks", "networkx: Weisfeiler-Lehman", measure(hash_blocks)),
        (
            "equal blocks",
            "fxmem: signatures",
            measure(lambda: len(fold_repeats(blocks, rows, lambda _: None).children)),
        ),
    ]
    table = [(question, way, f"{ms:.1f}", found) for question, way, (ms, found) in asked]
    head = f"{layers} blocks, {step.nodes} nodes, {len(analysis.graph.operations)} operations"
    return f"{head}\n\n{tabulate(table, ('question', 'way', 'ms', 'found'), 'github')}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    print(compare(parser.parse_args().layers))


if __name__ == "__main__":
    main()

"""Which traced node each node of an FX graph is part of, and what that makes come before what.

Only attributes of the nodes are read: torch is not needed for that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NODE = "fxmem_node"
"""Key of an FX node's ``meta``: :data:`fxmem.tracing.fxgraph.NODE`, for those without torch."""

_PARTS = (operator.getitem, getattr, "size")
"""What takes a result apart."""


def find_owners(graph: Any) -> dict[Any, str]:
    """By node of the FX graph, the traced node that it is part of.

    What takes a result apart belongs to what made it; what computes sizes to what uses them.

    Args:
        graph: A ``torch.fx.Graph`` as it was traced.
    """
    owners: dict[Any, str] = {}
    waiting: list[Any] = []
    for node in graph.nodes:
        if NODE in node.meta:
            owners[node] = node.meta[NODE]
            owners.update(dict.fromkeys(waiting, owners[node]))
            waiting.clear()
        elif node.target in _PARTS and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if source in owners:
                owners[node] = owners[source]
        elif node.op not in ("placeholder", "output", "get_attr"):
            waiting.append(node)
    return owners


def iterate_precedences(graph: Any) -> Iterator[tuple[str, str]]:
    """Pairs of traced nodes of which the second takes values, or sizes, of the first.

    Args:
        graph: A ``torch.fx.Graph`` as it was traced.
    """
    owners = find_owners(graph)
    sources: dict[Any, frozenset[str]] = {}
    for node in graph.nodes:
        taken = frozenset[str]().union(*(sources[other] for other in node.all_input_nodes))
        owner = owners.get(node)
        sources[node] = taken
        if owner is not None:
            yield from ((source, owner) for source in taken - {owner})
            sources[node] = frozenset([owner])


def place_nodes(graph: Any, names: Sequence[str]) -> dict[Any, int]:
    """Where each node of the FX graph comes to stand when the traced nodes run in an order.

    What is part of no traced node, such as an attribute or the output, stays behind what it takes.

    Args:
        graph: A ``torch.fx.Graph`` as it was traced.
        names: The traced nodes, in the order in which they are to run.
    """
    owners = find_owners(graph)
    ranks = {name: rank for rank, name in enumerate(names)}
    places: dict[Any, int] = {}
    for node in graph.nodes:
        after = max((places[other] for other in node.all_input_nodes), default=-1)
        places[node] = _place(node, after, owners, ranks)
    ordered = sorted(graph.nodes, key=lambda node: places[node])  # what shares a place stays
    return {node: place for place, node in enumerate(ordered)}


def _place(node: Any, after: int, owners: Mapping[Any, str], ranks: Mapping[str, int]) -> int:
    if node.op == "placeholder":
        return -1
    if node.op == "output":
        return len(ranks)
    return ranks.get(owners.get(node, ""), after)

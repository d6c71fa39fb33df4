"""Traced nodes and overwritten values in an FX graph.

Only attributes of the nodes are read: torch is not needed for that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fxmem.planning.inplace.forms import COMMUTATIVE, InplaceForm, read_form
from fxmem.planning.plan import InplaceChange

NODE = "fxmem_node"
"""Key of an FX node's ``meta``: :data:`fxmem.tracing.fxgraph.NODE`, for those without torch."""

WATCHED = "fxmem_watched"
"""The same of :data:`fxmem.tracing.fxgraph.WATCHED`."""

_PARTS = (operator.getitem, getattr, "size")
"""Targets that take a result apart."""


@dataclass(frozen=True, slots=True)
class OverwritingNode:
    """A node of an FX graph that overwrites the result of another, by a call of some form."""

    node: Any
    form: InplaceForm
    is_second: bool  # whether the second of its two values is overwritten
    maker: Any  # the call of a module that made the value; None where no module did
    consumers: tuple[Any, ...]  # the calls of other modules that take the value

    @property
    def is_watched(self) -> bool:
        """Returns whether hooks of these modules, as traced, may keep the overwritten value."""
        given = (*self.consumers, *((self.node,) if self.node.op == "call_module" else ()))
        made = () if self.maker is None else (self.maker,)
        return any(n.meta[WATCHED][0] for n in given) or any(n.meta[WATCHED][1] for n in made)


def find_overwriting(graph: Any, changes: Iterable[InplaceChange]) -> Iterator[OverwritingNode]:
    """Finds the nodes of a traced FX graph that changes are of; some have no place in it."""
    owners = find_owners(graph)
    by_name = {node.meta[NODE]: node for node in graph.nodes if NODE in node.meta}
    for change in changes:
        node = by_name[change.node]
        form = read_form(change.call)
        taken = [n for n in node.all_input_nodes if owners.get(n) == change.overwrites]
        if len(taken) != 1:
            continue
        places = [*node.args, *node.kwargs.values()]
        is_second = places[0] is not taken[0] and len(places) > 1 and places[1] is taken[0]
        if is_second and form.name not in COMMUTATIVE:
            continue
        (value,) = taken
        users = dict.fromkeys(value.users)
        while value.op not in ("call_module", "placeholder", "get_attr") and value.all_input_nodes:
            value = value.all_input_nodes[0]  # of which it may be a view
            users |= dict.fromkeys(value.users)
        consumers = tuple(n for n in users if n.op == "call_module" and n is not node)
        maker = value if value.op == "call_module" else None
        yield OverwritingNode(node, form, is_second, maker, consumers)


def find_owners(graph: Any) -> dict[Any, str]:
    """Finds, by node of a traced FX graph, the traced node that it is part of.

    Nodes that take a result apart belong to its maker, nodes that compute sizes to their user.
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

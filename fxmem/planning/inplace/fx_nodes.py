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
"""Likewise :data:`fxmem.tracing.fxgraph.WATCHED`."""

_PARTS = (operator.getitem, getattr, "size")
"""What takes a result apart."""


@dataclass(frozen=True, slots=True)
class OverwritingNode:
    """A node of an FX graph that overwrites what another made.

    Attributes:
        node: It.
        form: What is called.
        is_second: Whether the second of its two values is overwritten.
        maker: The call of a module that made the value; None where no module did.
        consumers: The calls of other modules that take the value.
    """

    node: Any
    form: InplaceForm
    is_second: bool
    maker: Any
    consumers: tuple[Any, ...]

    @property
    def is_watched(self) -> bool:
        """Whether hooks of those modules, as they were traced, may keep what is overwritten."""
        given = (*self.consumers, *((self.node,) if self.node.op == "call_module" else ()))
        made = () if self.maker is None else (self.maker,)
        return any(n.meta[WATCHED][0] for n in given) or any(n.meta[WATCHED][1] for n in made)


def find_overwriting(graph: Any, changes: Iterable[InplaceChange]) -> Iterator[OverwritingNode]:
    """What changes overwrite in an FX graph; those that it has no place for are left out.

    Args:
        graph: A ``torch.fx.Graph`` as it was traced.
        changes: Of it.
    """
    owners = find_owners(graph)
    by_name = {node.meta[NODE]: node for node in graph.nodes if NODE in node.meta}
    for change in changes:
        node = by_name[change.node]
        form = read_form(change.call)
        taken = [n for n in node.all_input_nodes if owners.get(n) == change.overwrites]
        if len(taken) != 1:
            continue
        places = [*node.args, *node.kwargs.values()]
        is_second = len(places) > 1 and places[1] is taken[0]
        if is_second and form.name not in COMMUTATIVE:
            continue
        yield OverwritingNode(node, form, is_second, *_find_watchers(node, taken[0]))


def _find_watchers(node: Any, value: Any) -> tuple[Any, tuple[Any, ...]]:
    """The modules that made a value and that take it, but for the one that overwrites it."""
    users = dict.fromkeys(value.users)
    while value.op not in ("call_module", "placeholder", "get_attr") and value.all_input_nodes:
        value = value.all_input_nodes[0]
        users |= dict.fromkeys(value.users)
    consumers = tuple(n for n in users if n.op == "call_module" and n is not node)
    return value if value.op == "call_module" else None, consumers


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

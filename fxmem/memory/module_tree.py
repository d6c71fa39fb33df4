"""The modules of a model as a tree, each with the figures of all that is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fxmem.graph import Category, MemoryGraph, Phase, Storage
from fxmem.memory.liveness import Peak

_HANDED_IN = ("placeholder", "output")


@dataclass(frozen=True, slots=True)
class Module:
    """A module, or the model itself, with all that is in it and all of its calls.

    Attributes:
        fqn: Qualified name; empty for the model itself.
        class_name: Its class; empty for the model itself, and for a module that is never called
            as one, such as a ``ModuleList``.
        shape: Shape of the first tensor that its last call returned; None where there is none,
            and where the class is empty.
        parameters: Elements of its parameters, shared ones once.
        parameter_bytes: Bytes of its parameters, shared ones once.
        forward_flops: FLOPs of its forward; the loss is part of the model itself.
        backward_flops: FLOPs of its backward, recomputation included.
        output_bytes: New storages in the results of its nodes.
        saved_bytes: Activations that its nodes were the first to save for backward.
        live_bytes: Bytes alive at the peak: its parameters and buffers with their gradients and
            optimizer state, and all that its nodes made. Those of the model itself are the peak.
        nodes: Indices of its nodes that lie in none of its children.
        children: Modules within, in the order in which they first ran.
    """

    fqn: str
    class_name: str = ""
    shape: tuple[int, ...] | None = None
    parameters: int = 0
    parameter_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    live_bytes: int = 0
    nodes: tuple[int, ...] = ()
    children: tuple[Module, ...] = ()

    def walk(self) -> Iterator[Module]:
        """Yields the module and all modules in it, each before those in it."""
        yield self
        for child in self.children:
            yield from child.walk()


SUMS = (
    *("parameters", "parameter_bytes", "forward_flops", "backward_flops"),
    *("output_bytes", "saved_bytes", "live_bytes"),
)
"""Fields of a :class:`Module` that include its children."""


@dataclass(slots=True)
class _Draft:
    fqn: str
    children: dict[str, _Draft] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))


def build_modules(graph: MemoryGraph, peak: Peak) -> Module:
    """Builds the tree of the modules that run in a step.

    Args:
        graph: The memory graph of the step.
        peak: That graph's peak.
    """
    model, drafts = _Draft(""), dict[int, _Draft]()
    for node in graph.nodes:
        draft = model
        # The loss is no module of the model, and may have names that are.
        parts = node.fqn.split(".") if node.fqn and node.phase is not Phase.LOSS else ()
        for part in parts if node.op not in _HANDED_IN else ():
            fqn = f"{draft.fqn}.{part}" if draft.fqn else part
            draft = draft.children.setdefault(part, _Draft(fqn))
        drafts[node.index] = draft
        if node.op not in _HANDED_IN:
            draft.nodes.append(node.index)
        for name in ("forward_flops", "backward_flops", "output_bytes", "saved_bytes"):
            draft.sums[name] += getattr(node, name)

    def find_owner(storage: Storage) -> _Draft:
        if storage.node is not None:
            return drafts[storage.node]
        draft = model  # the innermost that ran
        for part in storage.name.split(".")[:-1] if storage.category is not Category.INPUT else ():
            if part not in draft.children:
                break
            draft = draft.children[part]
        return draft

    for storage in graph.storages:
        if storage.category is Category.PARAMETER:
            sums = find_owner(storage).sums
            sums["parameters"] += _count_elements(storage)
            sums["parameter_bytes"] += storage.nbytes - storage.slack_bytes
    for storage in peak.live:
        find_owner(storage).sums["live_bytes"] += storage.nbytes
    at_peak = model if peak.node is None else drafts[peak.node.index]
    at_peak.sums["live_bytes"] += peak.workspace_bytes
    return _finish(model, graph, _find_results(graph))


def _count_elements(storage: Storage) -> int:
    """Counts the elements on a storage, of all its tensors: the weights of an LSTM may share one.

    >>> fields = (Category.PARAMETER, "fc.weight", (4,), "bfloat16", -1, None)
    >>> _count_elements(Storage(0, 512, *fields, slack_bytes=504))
    4
    """
    bits = re.search(r"\d+", storage.dtype)  # "bfloat16", "float8_e4m3fn", "bool"
    return (storage.nbytes - storage.slack_bytes) // max(int(bits[0]) // 8 if bits else 1, 1)


def _find_results(graph: MemoryGraph) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Finds the class of each module that is called, and the shape of its last result."""
    found: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for call in graph.calls:
        made = reversed(graph.nodes[call.start : call.stop])
        first = next(iter(call.results), None)
        shape = next((node.shape for node in made if first in node.results and node.shape), None)
        found[call.fqn] = call.class_name, shape
    for node in graph.nodes:
        if node.op == "call_module" and node.phase is Phase.FORWARD:
            found[node.fqn] = node.target, node.shape
    return found


def _finish(
    draft: _Draft,
    graph: MemoryGraph,
    results: dict[str, tuple[str, tuple[int, ...] | None]],
) -> Module:
    children = [_finish(child, graph, results) for child in draft.children.values()]
    class_name, shape = results.get(draft.fqn, ("", None))
    sums = {
        name: own + sum(getattr(child, name) for child in children)
        for name, own in draft.sums.items()
    }
    nodes = tuple(draft.nodes)
    return Module(draft.fqn, class_name, shape, **sums, nodes=nodes, children=tuple(children))

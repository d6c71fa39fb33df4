"""Which nodes may not be computed again, and where no region may begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, Effect, MemoryGraph, Operation
from fxmem.planning.facts import StepFacts, find_node, is_batch_norm
from fxmem.planning.regions import Region

_REASONS = {
    Effect.GENERATOR: "draws from a generator of its own, whose state is not restored",
    Effect.DATA: "its sizes or values depend on the data",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan may do.

    Attributes:
        fixed: The nodes that may not be computed again, by index, with the reason.
        starts: The nodes that no region may begin with, by index, with the reason.
    """

    fixed: Mapping[int, str]
    starts: Mapping[int, str]

    def allows(self, region: Region) -> bool:
        """Whether a region, and those within it, may be computed again."""
        if region.start in self.starts or region.stop <= region.start:
            return False
        if any(region.start <= node < region.stop for node in self.fixed):
            return False
        return all(map(self.allows, region.children))


def find_limits(facts: StepFacts) -> Limits:
    """Looks up what may not be computed again.

    Source of the rules: ``torch.utils.checkpoint`` restores the global random number generators
    and nothing else; a region takes its inputs as they are when backward comes.

    Args:
        facts: The step.
    """
    graph = facts.graph
    fixed: dict[int, str] = {}
    starts: dict[int, str] = {}
    makers = {made.index: made for made in facts.made}
    for node in range(facts.nodes):
        operations = facts.list_operations(node, node + 1)
        reason = next(filter(None, (_find_reason(graph, o, operations) for o in operations)), "")
        if reason:
            fixed[node] = reason
    stop = facts.end_operation[-1] if facts.end_operation else 0  # loss may change things too
    for operation in graph.operations[:stop]:
        name = "loss" if operation.node is None else graph.nodes[operation.node].name
        for index in operation.writes:
            made = makers.get(index)
            if made is None:
                readers = _find_readers(facts, index, operation.index)
                reason = f"{name} changes {graph.storages[index].name}, which it reads, in place"
                fixed.update((node, reason) for node in readers if node not in fixed)
                continue
            last = min(find_node(facts, operation.index), facts.nodes - 1)
            for start in range(made.node + 1, last + 1):
                starts.setdefault(start, f"{name} changes its input in place")
    return Limits(fixed, starts)


def _find_reason(
    graph: MemoryGraph, operation: Operation, neighbours: tuple[Operation, ...]
) -> str:
    if operation.effect in _REASONS:
        return _REASONS[operation.effect]
    for index in operation.writes:
        storage = graph.storages[index]
        if storage.born != RESIDENT:
            continue
        counts = any(map(is_batch_norm, neighbours))
        if not (storage.category is Category.BUFFER and counts):
            return f"changes {storage.name} in place"
    return ""


def _find_readers(facts: StepFacts, storage: int, before: int) -> Iterator[int]:
    """The nodes that read a storage before an operation."""
    graph = facts.graph
    is_buffer = graph.storages[storage].category is Category.BUFFER
    for node in range(min(facts.nodes, find_node(facts, before))):
        operations = facts.list_operations(node, node + 1)
        # Batch normalisation takes copies of what it updates itself.
        updates = is_buffer and any(map(is_batch_norm, operations))
        if not updates and any(storage in operation.reads for operation in operations):
            yield node

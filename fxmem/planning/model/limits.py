"""Which nodes may not be computed again, and where no segment may begin."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, Effect, MemoryGraph, Operation
from fxmem.planning.model.index import StepIndex, find_node
from fxmem.planning.model.module_state import is_batch_norm
from fxmem.planning.model.segments import SegmentRange, iterate_segments

_EARLY = "forward runs its backward, which would compute it again before it is over"
_REASONS = {
    Effect.GENERATOR: "draws from a generator of its own, whose state is not restored",
    Effect.DATA: "its sizes or values depend on the data",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan may do.

    Attributes:
        fixed: The nodes that may not be computed again, by index, with the reason.
        starts: The nodes that no segment may begin with, by index, with the reason.
    """

    fixed: Mapping[int, str]
    starts: Mapping[int, str]

    def allows(self, segment: SegmentRange) -> bool:
        """Tells whether a segment, and those within it, may be computed again."""
        if any(segment.start <= node < segment.stop for node in self.fixed):
            return False
        every = iterate_segments([segment])
        return all(each.start < each.stop and each.start not in self.starts for each in every)


def find_limits(step: StepIndex) -> Limits:
    """Looks up what may not be computed again.

    Source of the rules: ``torch.utils.checkpoint`` restores the global random number generators
    and nothing else; a segment takes its inputs as they are when backward comes.

    Args:
        step: The step.
    """
    graph = step.graph
    fixed: dict[int, str] = {}
    starts: dict[int, str] = {}
    stop = step.end_operation[-1] if step.end_operation else 0  # loss may change things too
    changed: dict[int, int] = {}  # what was there before the step -> the node that last changes it
    for operation in graph.operations[:stop]:
        node = find_node(step, operation.index)
        for index in operation.writes:
            if index not in step.makers:
                changed[index] = node
                continue
            for start in range(step.makers[index].node + 1, min(node + 1, step.nodes)):
                starts.setdefault(start, f"{graph.nodes[node].name} changes its input in place")
    for node, statistics in enumerate(step.statistics):  # whose operator does not tell of them
        changed.update((index, max(node, changed.get(index, node))) for index in statistics)
    for node in range(step.nodes):
        operations = step.list_operations(node, node + 1)
        own = {*step.states[node]}
        reasons = (_find_reason(graph, o, operations, own) for o in operations)
        reason = (
            next(filter(None, reasons), _EARLY if graph.nodes[node].early_backward else "")
            or _find_early_save(step, node, operations)
            or _find_later_change(graph, node, operations, changed, own)
        )
        if reason:
            fixed[node] = reason
    return Limits(fixed, starts)


def _find_reason(
    graph: MemoryGraph,
    operation: Operation,
    neighbours: tuple[Operation, ...],
    states: Collection[int],
) -> str:
    counts = any(map(is_batch_norm, neighbours))
    if operation.effect in _REASONS:
        # Without momentum it asks how many batches there were, for its statistics only.
        reads = [graph.storages[index].category for index in operation.reads]
        if not (counts and reads and all(category is Category.BUFFER for category in reads)):
            return _REASONS[operation.effect]
    for index in operation.writes:
        storage = graph.storages[index]
        if storage.born != RESIDENT or index in states:
            continue
        if not (storage.category is Category.BUFFER and counts):
            return f"changes {storage.name} in place"
    return ""


def _find_early_save(step: StepIndex, node: int, operations: Iterable[Operation]) -> str:
    """What an operator fills after autograd has kept it, as ``rrelu_with_noise`` does its noise.

    A checkpoint stops when all is kept that is to be: before the operator runs, if it is the last.
    """
    kept = {(save.position, save.storage) for save in step.saves_by_node[node]}
    for operation in operations:
        if operation.name.split(".")[1].endswith("_"):  # of one part, where another is kept
            continue
        if any((operation.index, i) in kept and i in step.makers for i in operation.writes):
            return "fills what it has saved, which is too late for a run that ends there"
    return ""


def _find_later_change(
    graph: MemoryGraph,
    node: int,
    operations: tuple[Operation, ...],
    changed: Mapping[int, int],
    own: Collection[int],
) -> str:
    """What a node reads that a later one changes: a second time it would read something else."""
    is_norm = any(map(is_batch_norm, operations))
    for index in (index for operation in operations for index in operation.reads):
        if index in own:
            continue
        storage = graph.storages[index]
        # Batch normalisation takes copies of what it updates itself.
        if changed.get(index, node) > node and not (
            is_norm and storage.category is Category.BUFFER
        ):
            return (
                f"reads {storage.name}, which {graph.nodes[changed[index]].name} changes in place"
            )
    return ""

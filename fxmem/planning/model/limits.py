"""The nodes that may not be recomputed, and the nodes that no segment may begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, Effect
from fxmem.planning.model.index import StepIndex, is_batch_norm
from fxmem.planning.model.segment_ranges import SegmentRange, iterate_segments

_EARLY = "forward runs its backward, which would compute it again before it is over"
_LATE_FILL = "writes to a tensor after saving it; an early-stopped recomputation would miss it"
_REASONS = {
    Effect.GENERATOR: "draws from a generator of its own, whose state is not restored",
    Effect.DATA: "its sizes or values depend on the data",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The nodes that plans cannot use freely."""

    fixed: Mapping[int, str]  # the nodes that may not be recomputed, by index, with the reason
    starts: Mapping[int, str]  # the nodes that no segment may begin with, by index, with the reason

    def allows(self, segment: SegmentRange) -> bool:
        """Returns whether a segment may be recomputed, with the segments within."""
        if any(segment.start <= node < segment.stop for node in self.fixed):
            return False
        every = iterate_segments([segment])
        return all(each.start < each.stop and each.start not in self.starts for each in every)


def find_limits(step: StepIndex) -> Limits:
    """Finds the limits of a step.

    Source of the rules: ``torch.utils.checkpoint`` restores the global random number generators
    and nothing else; a segment takes its inputs as they are when backward comes.
    """
    graph = step.graph
    starts: dict[int, str] = {}
    stop = step.end_operation[-1] if step.end_operation else 0  # loss may change things too
    changed: dict[int, int] = {}  # what was there before the step -> the node that last changes it
    for operation in graph.operations[:stop]:
        node = step.find_node(operation.index)
        for index in operation.writes:
            if index not in step.makers:
                changed[index] = node
                continue
            for start in range(step.makers[index].node + 1, min(node + 1, step.nodes)):
                starts.setdefault(start, f"{graph.nodes[node].name} changes its input in place")
    for node, statistics in enumerate(step.statistics):  # which its operator changes unseen
        changed.update((index, max(node, changed.get(index, node))) for index in statistics)
    reasons = ((node, next(_find_reasons(step, node, changed), "")) for node in range(step.nodes))
    return Limits({node: reason for node, reason in reasons if reason}, starts)


def _find_reasons(step: StepIndex, node: int, changed: Mapping[int, int]) -> Iterator[str]:
    """Finds reasons not to recompute a node, the first of which a plan reports."""
    graph, states = step.graph, step.states[node]
    operations = step.list_operations(node, node + 1)
    is_norm = any(map(is_batch_norm, operations))
    for operation in operations:
        if operation.effect in _REASONS:
            # Without momentum it asks how many batches there were, for its statistics only.
            read = {graph.storages[index].category for index in operation.reads}
            if not (is_norm and read == {Category.BUFFER}):
                yield _REASONS[operation.effect]
        for index in operation.writes:
            storage = graph.storages[index]
            is_statistic = is_norm and storage.category is Category.BUFFER
            if storage.born == RESIDENT and index not in states and not is_statistic:
                yield f"changes {storage.name} in place"
    if graph.nodes[node].early_backward:
        yield _EARLY
    # Filling what autograd has kept, as ``rrelu_with_noise`` its noise: a checkpoint stops when all
    # is kept that is to be, which is before the operator runs if it is the last.
    kept = {(save.position, save.storage) for save in step.saves_by_node[node]}
    if any(
        (operation.index, index) in kept and index in step.makers
        for operation in operations
        if not operation.name.split(".")[1].endswith("_")  # of one part, where another is kept
        for index in operation.writes
    ):
        yield _LATE_FILL
    for index in (index for operation in operations for index in operation.reads):
        storage = graph.storages[index]
        # Batch normalisation takes copies of what it updates itself.
        is_statistic = is_norm and storage.category is Category.BUFFER
        if changed.get(index, node) > node and index not in states and not is_statistic:
            changer = graph.nodes[changed[index]].name
            yield f"reads {storage.name}, which {changer} changes in place"

"""The nodes and the modules that may be recomputed, and the reasons against the others.

A module is recomputed in all of its calls or in none where plans leave the model's code as it is:
what decides at run time is its ``forward``, which does not know which of the calls it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, Effect, ModuleCall
from fxmem.planning.model.index import StepIndex, is_batch_norm
from fxmem.planning.model.recomputation import SegmentRange, Span, iterate_segments

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
    graph = step.graph
    own = (*step.statistics[node], *step.states[node])  # a checkpoint looks after these
    operations = step.list_operations(node, node + 1)
    is_norm = any(map(is_batch_norm, operations))
    for operation in operations:
        if operation.effect in _REASONS:
            # Without momentum it asks how many batches there were, for its statistics only.
            read = {graph.storages[index].category for index in operation.reads}
            if not (is_norm and read == {Category.BUFFER}):
                yield _REASONS[operation.effect]
        for index in operation.writes:
            if graph.storages[index].born == RESIDENT and index not in own:
                yield f"changes {graph.storages[index].name} in place"
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
        if changed.get(index, node) > node and index not in own:
            changer = graph.nodes[changed[index]].name
            yield f"reads {graph.storages[index].name}, which {changer} changes in place"


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A module that may be recomputed, with the nodes of each of its calls in order."""

    fqn: str
    spans: tuple[Span, ...]


def list_modules(
    step: StepIndex, limits: Limits
) -> tuple[tuple[ModuleChoice, ...], Mapping[str, str]]:
    """Lists the modules that may be recomputed, and the reasons against the others, by name.

    Of modules that run the same nodes, the outermost is listed, and of modules that share some of
    their calls one. They are in the order of their first calls, outer before inner.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in step.graph.calls:
        calls.setdefault(call.fqn, []).append(call)
    end = step.end_operation[step.nodes - 1] if step.nodes else 0
    last_held = {}  # by storage, the last operation of forward in which the user's code has it
    for made in step.made:
        last = step.graph.let_go[made.index] if step.graph.let_go else made.born
        if last is None:  # to the end of the step, or never in the user's hands
            last = end if made.is_output else made.born
        last_held[made.index] = last
    taken: set[Span] = set()
    apart: dict[str, list[Span]] = {}
    reasons: dict[str, str] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        ran = [call for call in calls[fqn] if call.stop > call.start]
        spans = [(call.start, call.stop) for call in ran]
        found = (reason for c in ran for reason in _find_obstacles(step, limits, c, last_held))
        if reason := next(found, ""):
            reasons[fqn] = reason
        elif ran and taken.isdisjoint(spans):
            apart[fqn] = spans
            taken.update(spans)
    return _choose_outermost(apart), reasons


def list_calls(step: StepIndex, limits: Limits) -> tuple[ModuleChoice, ...]:
    """Lists the modules with the calls that a rewritten graph may recompute, in order.

    Of modules that run the same nodes, the outermost is listed.
    """
    calls: dict[str, set[Span]] = {}
    for call in step.graph.calls:
        if limits.allows(SegmentRange(call.start, call.stop)):
            calls.setdefault(call.fqn, set()).add((call.start, call.stop))
    return _choose_outermost(calls)


def _choose_outermost(calls: Mapping[str, Iterable[Span]]) -> tuple[ModuleChoice, ...]:
    """Chooses of modules with the same spans the outermost, in the order of their first calls."""
    choices: dict[tuple[Span, ...], ModuleChoice] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        spans = tuple(sorted(calls[fqn]))
        choices.setdefault(spans, ModuleChoice(fqn, spans))
    return tuple(sorted(choices.values(), key=lambda c: (c.spans[0][0], -c.spans[0][1])))


def _find_obstacles(
    step: StepIndex, limits: Limits, call: ModuleCall, last_held: Mapping[int, int]
) -> Iterator[str]:
    """Finds reasons not to recompute a call, the first of which a plan reports."""
    nodes, storages = step.graph.nodes, step.graph.storages
    if call.obstacle:
        yield call.obstacle
    for node in range(call.start, call.stop):
        if node in limits.fixed:
            yield f"{nodes[node].name} {limits.fixed[node]}"
    if call.start in limits.starts:
        yield limits.starts[call.start]
    first, last = step.first_operation[call.start], step.end_operation[call.stop - 1] - 1
    read = {i for o in step.list_operations(call.start, call.stop) for i in o.reads}
    for index in sorted(read.difference(call.inputs)):
        if RESIDENT < storages[index].born < first:
            name = storages[index].name
            yield f"it uses {name}, which is computed before it and is none of its arguments"
    for made in step.list_activations(first, last + 1):
        if made.index not in call.results and last_held[made.index] > last:
            yield f"what it makes is held elsewhere than in its result: {storages[made.index].name}"

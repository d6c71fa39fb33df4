"""Which operations of forward could overwrite their input, and what the step is then.

The recording knows which argument a result fits on (:attr:`fxmem.graph.Operation.overwritable`),
who reads each storage and who saves it for backward. An operator whose backward needs its own
input saves a copy of it where it runs in place (``original_self`` in
``tools/autograd/gen_variable_type.py``), so nothing is gained and it is left out. Leaky ReLU's
backward takes the result instead. That of the ELUs does too, and then rounds otherwise
(``elu_backward`` with ``is_result``), so in training they are left out.

A plan is applied to other batches too, and to modules whose ``training`` or ``p`` changes. What may
then lie on the same memory as another value is not overwritten either, though here it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from fxmem.graph import RESIDENT, MemoryGraph, Node, Operation, Phase
from fxmem.planning.inplace.forms import (
    copies_where_it_must,
    find_form,
    is_commutative,
    may_return_input,
)
from fxmem.planning.inplace.merging import merge_storages
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.peaks import PeakMeter, meter_graph
from fxmem.planning.model.segments import SegmentRange, iterate_segments
from fxmem.planning.plan import InplaceChange

_KEEPS_RESULT = "aten.leaky_relu.default"
"""The operator whose in-place variant saves its result where the other saves its input."""


@dataclass(frozen=True, slots=True)
class _Overwrite:
    """A node that could overwrite a storage.

    Attributes:
        node: It.
        call: What to call instead.
        operation: The operator that makes its result.
        result: Index of the storage that is then not made.
        target: Index of the storage that is overwritten.
        source: The node whose result that is.
    """

    node: Node
    call: str
    operation: Operation
    result: int
    target: int
    source: Node


def find_inplace(step: StepIndex) -> tuple[InplaceChange, ...]:
    """Operations of forward that could run in place, with the same results and gradients.

    All of them can be applied together; see :func:`apply_inplace`.

    Args:
        step: The step as it was recorded.

    Returns:
        What lowers the peak most comes first; what does not lower it alone comes last.
    """
    graph = step.graph
    meter = meter_graph(graph)
    uses = _Uses(graph)
    best: list[tuple[int, _Overwrite]] = []
    for node in graph.nodes[: step.nodes]:
        found = [
            (_measure_fall(graph, meter, overwrite), overwrite)
            for overwrite in _find_overwrites(graph, uses, node)
        ]
        best += [max(found, key=lambda item: item[0])] if found else []
    best.sort(key=lambda item: (-item[0], -graph.storages[item[1].result].nbytes))
    return tuple(
        InplaceChange(
            node=overwrite.node.name,
            call=overwrite.call,
            source=overwrite.node.source,
            saving_bytes=saving_bytes,
            overwrites=overwrite.source.name,
        )
        for saving_bytes, overwrite in _drop_conflicts(best)
    )


def apply_inplace(graph: MemoryGraph, changes: Iterable[InplaceChange]) -> MemoryGraph:
    """The step with these operations in place.

    A result then lies on the storage that it overwrites, which lives until both are let go of.

    Args:
        graph: The step that they were found in.
        changes: Of those, any number.
    """
    merged: dict[int, int] = {}
    in_place: dict[int, Operation] = {}
    later: set[tuple[int, int]] = set()  # (storage, node): saved once it is overwritten
    for overwrite in _find_chosen(graph, changes):
        target = merged.get(overwrite.target, overwrite.target)
        merged[overwrite.result] = target
        in_place[overwrite.operation.index] = _run_in_place(overwrite)
        later.add((overwrite.target, overwrite.node.index))
    operations = tuple(in_place.get(o.index, o) for o in graph.operations)
    saves = tuple(
        replace(s, position=s.position + 1) if (s.storage, s.node) in later else s
        for s in graph.saves
    )
    return merge_storages(replace(graph, operations=operations, saves=saves), merged)


def choose_inplace(
    graph: MemoryGraph, changes: Iterable[InplaceChange], segments: Iterable[SegmentRange]
) -> tuple[InplaceChange, ...]:
    """Those changes that leave to every segment what it takes, for when it runs again.

    Args:
        graph: The step that they were found in.
        changes: Of those, any number.
        segments: What is computed again.
    """
    changes = [*changes]
    starts = [segment.start for segment in iterate_segments(segments)]
    kept = set()
    for overwrite in _find_chosen(graph, changes):
        maker = graph.operations[graph.storages[overwrite.target].born].node
        if not any((maker or 0) < start <= overwrite.node.index for start in starts):
            kept.add(overwrite.node.name)
    return tuple(change for change in changes if change.node in kept)


def _find_chosen(graph: MemoryGraph, changes: Iterable[InplaceChange]) -> Iterator[_Overwrite]:
    """What changes overwrite, in order."""
    uses = _Uses(graph)
    chosen = {change.node: change.overwrites for change in changes}
    for node in graph.nodes:
        if node.name in chosen:
            found = _find_overwrites(graph, uses, node)
            yield from islice((o for o in found if o.source.name == chosen[node.name]), 1)


class _Uses:
    """Who reads and who saves each storage."""

    def __init__(self, graph: MemoryGraph) -> None:
        self.operations: list[list[Operation]] = [[] for _ in graph.nodes]
        self.last: dict[int, Operation] = {}
        self.last_in_forward: dict[int, Operation] = {}
        self.readers: dict[int, list[Operation]] = {}
        for operation in graph.operations:
            touched = dict.fromkeys((*operation.reads, *operation.writes), operation)
            self.last |= touched
            if operation.phase in (Phase.FORWARD, Phase.LOSS):
                self.last_in_forward |= touched
                for index in operation.reads:
                    self.readers.setdefault(index, []).append(operation)
                if operation.node is not None:
                    self.operations[operation.node].append(operation)
        self.savers: dict[int, set[int | None]] = {}
        for save in graph.saves:
            self.savers.setdefault(save.storage, set()).add(save.node)


def _find_overwrites(graph: MemoryGraph, uses: _Uses, node: Node) -> Iterator[_Overwrite]:
    """What a node could overwrite: any one of these."""
    if len(node.results) != 1:
        return
    (result,) = node.results
    operations = uses.operations[node.index]
    operation = next((o for o in operations if o.index == graph.storages[result].born), None)
    if operation is None:
        return
    form = find_form(node.op, node.target, operation.name)
    if form is None:
        return
    for target in operation.overwritable:
        is_first = operation.reads[0] == target
        if not is_first and not is_commutative(operation.name):
            continue
        source = _find_source(graph, node, target)
        if not is_first and source is not None and operation.reads[0] in source.results:
            continue  # its name would not tell which of its results
        if source is not None and _is_free(graph, uses, node, operation, target):
            yield _Overwrite(node, str(form), operation, result, target, source)


def _find_source(graph: MemoryGraph, node: Node, storage: int) -> Node | None:
    """The node whose result, on this storage, a node takes; None unless there is exactly one."""
    inputs = [graph.nodes[index] for index in node.inputs]
    sources = [source for source in inputs if storage in source.results]
    return sources[0] if len(sources) == 1 else None


def _is_free(
    graph: MemoryGraph, uses: _Uses, node: Node, operation: Operation, target: int
) -> bool:
    """Tells whether nothing needs what a storage held before an operation of this node."""
    storage = graph.storages[target]
    if storage.born == RESIDENT or storage.died is None:
        return False
    if _may_be_shared(graph, uses, operation, target):
        return False
    if operation.name == _KEEPS_RESULT and uses.savers.get(target) == {node.index}:
        last = uses.last[target]
        return uses.last_in_forward[target] is operation and last.node == node.index
    return target not in uses.savers and uses.last[target] is operation


def _may_be_shared(graph: MemoryGraph, uses: _Uses, operation: Operation, target: int) -> bool:
    """Whether, for other sizes or settings, something else may lie on a storage as well."""
    maker = graph.operations[graph.storages[target].born]
    for other in (maker, *uses.readers.get(target, ())):
        if other.node == operation.node:
            continue
        if other.node is None:
            return True
        node = graph.nodes[other.node]
        if may_return_input(node.op, node.target):
            return True
        is_returned = any(graph.storages[index].born == other.index for index in node.results)
        if is_returned and copies_where_it_must(node.target, other.name):
            return True
    return False


def _measure_fall(graph: MemoryGraph, meter: PeakMeter, overwrite: _Overwrite) -> int:
    """While both are there without the change, one is not with it."""
    result, target = graph.storages[overwrite.result], graph.storages[overwrite.target]
    ends = [storage.died for storage in (result, target) if storage.died is not None]
    return meter.measure_fall([(result.nbytes, result.born, min(ends))])


def _drop_conflicts(found: Iterable[tuple[int, _Overwrite]]) -> Iterator[tuple[int, _Overwrite]]:
    """Leaves out what would overwrite a result that another one, in place, saves for backward."""
    kept: set[int] = set()
    overwritten: set[int] = set()
    for saving_bytes, overwrite in found:
        keeps = overwrite.operation.name == _KEEPS_RESULT
        if overwrite.target in kept or (keeps and overwrite.result in overwritten):
            continue
        overwritten.add(overwrite.target)
        if keeps:
            kept.add(overwrite.result)
        yield saving_bytes, overwrite


def _run_in_place(overwrite: _Overwrite) -> Operation:
    namespace, operator, overload = overwrite.operation.name.split(".")
    return replace(
        overwrite.operation,
        name=f"{namespace}.{operator}_.{overload}",
        writes=(*overwrite.operation.writes, overwrite.target),
    )

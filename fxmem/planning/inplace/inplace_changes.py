"""Operations of forward that could overwrite their input, and the step with them in place.

The recording knows which argument a result fits on (:attr:`fxmem.graph.Operation.overwritable`),
who reads each storage and who saves it for backward. An operator whose backward needs its own
input saves a copy where it runs in place (``original_self`` in
``tools/autograd/gen_variable_type.py``), so nothing is gained and it is left out. Leaky ReLU's
backward takes the result instead. That of the ELUs does too, and then rounds otherwise
(``elu_backward`` with ``is_result``), so in training they are left out.

A plan is applied to other batches too, and to modules whose ``training`` or ``p`` changes. A value
that may then share storage with another is not overwritten either, though here it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fxmem.graph import RESIDENT, Category, MemoryGraph, Node, Operation, Phase, Storage
from fxmem.memory.timeline import build_timeline, measure_fall
from fxmem.planning.inplace.forms import COMMUTATIVE_OPERATORS, find_form, may_return_input
from fxmem.planning.model.index import StepIndex
from fxmem.planning.plan import InplaceChange

_KEEPS_RESULT = "aten.leaky_relu.default"
"""The operator whose in-place variant saves its result where the other saves its input."""

_LASTING = (Category.OUTPUT, Category.ACTIVATION)
"""Categories of a result that a temporary takes when the result comes to share its storage."""


@dataclass(frozen=True, slots=True)
class _Overwrite:
    """A node that could overwrite a storage, ``target``, which ``source`` made.

    The operator then makes no storage ``result``; ``call`` is the text of the node's call.
    """

    node: Node
    call: str
    operation: Operation
    result: int
    target: int
    source: Node


def find_inplace(step: StepIndex) -> tuple[InplaceChange, ...]:
    """Finds operations of forward that could run in place, with the same results and gradients.

    All can be applied together. The change that lowers the peak most by itself comes first.
    """
    graph = step.graph
    live_bytes = build_timeline(graph).profile()
    uses = _Uses(graph)
    best: list[tuple[int, _Overwrite]] = []
    for node in graph.nodes[: step.nodes]:
        found = []
        for overwrite in _find_overwrites(graph, uses, node):
            # While both storages are there without the change, one is not with it.
            result, target = graph.storages[overwrite.result], graph.storages[overwrite.target]
            end = min(storage.died for storage in (result, target) if storage.died is not None)
            saving_bytes = measure_fall(live_bytes, [(result.nbytes, result.born, end)])
            found.append((saving_bytes, overwrite))
        best += [max(found, key=lambda item: item[0])] if found else []
    best.sort(key=lambda item: (-item[0], -graph.storages[item[1].result].nbytes))
    changes = []
    kept: set[int] = set()  # results that are saved where they are made in place
    overwritten: set[int] = set()
    for saving_bytes, overwrite in best:
        keeps = overwrite.operation.name == _KEEPS_RESULT
        if overwrite.target in kept or (keeps and overwrite.result in overwritten):
            continue
        overwritten.add(overwrite.target)
        if keeps:
            kept.add(overwrite.result)
        node, source = overwrite.node, overwrite.source.name
        changes.append(InplaceChange(node.name, overwrite.call, node.source, saving_bytes, source))
    return tuple(changes)


def apply_inplace(graph: MemoryGraph, changes: Iterable[InplaceChange]) -> MemoryGraph:
    """Applies changes to the step that they were found in, without what it saves for backward.

    A result then shares the storage that it overwrites, which lives until both are freed.
    """
    merged: dict[int, int] = {}
    in_place: dict[int, Operation] = {}
    uses, chosen = _Uses(graph), {change.node: change.overwrites for change in changes}
    for node in (node for node in graph.nodes if node.name in chosen):
        found = _find_overwrites(graph, uses, node)
        overwrite = next((o for o in found if o.source.name == chosen[node.name]), None)
        if overwrite is None:
            continue
        operation = overwrite.operation
        namespace, operator, overload = operation.name.split(".")
        merged[overwrite.result] = merged.get(overwrite.target, overwrite.target)
        in_place[operation.index] = replace(
            operation,
            name=f"{namespace}.{operator}_.{overload}",
            writes=(*operation.writes, overwrite.target),
        )
    if not merged:
        return graph
    operations = tuple(in_place.get(o.index, o) for o in graph.operations)
    return _merge_storages(replace(graph, operations=operations), merged)


class _Uses:
    """The operations that read and the nodes that save each storage."""

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
    """Finds the storages that a node could overwrite: any one of these."""
    if len(node.results) != 1:
        return
    (result,) = node.results
    operations = uses.operations[node.index]
    operation = next((o for o in operations if o.index == graph.storages[result].born), None)
    form = operation and find_form(node.op, node.target, operation.name)
    if operation is None or form is None:
        return
    inputs = [graph.nodes[index] for index in node.inputs]
    for target in operation.overwritable:
        first = operation.reads[0]
        if target != first and operation.name not in COMMUTATIVE_OPERATORS:
            continue
        if "masked_fill" in operation.name and len(operation.reads) == 1:
            continue  # PyTorch refuses to overwrite the mask
        sources = [source for source in inputs if target in source.results]
        if len(sources) != 1 or (target != first and first in sources[0].results):
            continue  # its name would not say which result
        if _is_free(graph, uses, node, operation, target):
            yield _Overwrite(node, str(form), operation, result, target, sources[0])


def _is_free(
    graph: MemoryGraph, uses: _Uses, node: Node, operation: Operation, target: int
) -> bool:
    """Returns whether nothing needs what a storage held before an operation of this node."""
    storage = graph.storages[target]
    if storage.born == RESIDENT or storage.died is None:
        return False
    for other in (graph.operations[storage.born], *uses.readers.get(target, ())):
        if other.node == operation.node:
            continue
        if other.node is None:
            return False
        user = graph.nodes[other.node]
        is_result = any(graph.storages[index].born == other.index for index in user.results)
        if may_return_input(user.op, user.target, other.name, is_result=is_result):
            return False
    last = uses.last[target]
    if operation.name == _KEEPS_RESULT and uses.savers.get(target) == {node.index}:
        return uses.last_in_forward[target] is operation and last.node == node.index
    return target not in uses.savers and last is operation


def _merge_storages(graph: MemoryGraph, merged: Mapping[int, int]) -> MemoryGraph:
    """Merges storages into older ones, each by index, which then hold the tensors of both."""
    groups: dict[int, list[Storage]] = {}
    lost = [0] * len(graph.nodes)
    for storage in graph.storages:
        groups.setdefault(merged.get(storage.index, storage.index), []).append(storage)
        if storage.index in merged and storage.node is not None:
            lost[storage.node] += storage.nbytes
    renamed = {old: new for new, old in enumerate(groups)}
    renamed |= {old: renamed[target] for old, target in merged.items()}

    def rename(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(renamed[index] for index in indices))

    storages = []
    for index, group in enumerate(groups.values()):
        last = max(group, key=lambda s: (s.died is None, s.died or 0, s.death_rank))
        categories = {storage.category for storage in group}
        storages.append(
            replace(
                group[0],
                index=index,
                category=next((c for c in _LASTING if c in categories), group[0].category),
                died=last.died,
                death_rank=last.death_rank,
            )
        )
    return replace(
        graph,
        nodes=tuple(
            replace(
                node,
                results=rename(node.results),
                output_bytes=max(0, node.output_bytes - lost[node.index]),
            )
            for node in graph.nodes
        ),
        storages=tuple(storages),
        operations=tuple(
            replace(
                operation,
                reads=rename(operation.reads),
                writes=rename(operation.writes),
                overwritable=rename(operation.overwritable),
            )
            for operation in graph.operations
        ),
        saved=(),
        saves=(),
        calls=tuple(
            replace(call, inputs=rename(call.inputs), results=rename(call.results))
            for call in graph.calls
        ),
        let_go=(),
        warmup=tuple(
            (old if old is None or old < 0 else renamed[old], nbytes)
            for old, nbytes in graph.warmup
        ),
    )

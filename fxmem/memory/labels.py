"""Labels of storages: their names, and where they have none, what made them.

In forward a storage is called like the node that made it. What backward and the optimizer make
belongs to nodes and parameters too, and is no result of theirs: it gets a label that says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.graph import Category, MemoryGraph, Operation, Phase, Storage
from fxmem.memory.liveness import find_updated

_ADDITIONS = ("aten.add.Tensor", "aten.add_.Tensor")


def label_storages(graph: MemoryGraph) -> tuple[str, ...]:
    """Labels each storage, by its index; see ``label`` in ``docs/json.md``.

    Args:
        graph: The memory graph of the step.

    Returns:
        The name of the storage; for a temporary of backward ``gradient of NODE`` where it is the
        gradient of that node's result, ``recompute of NODE`` where a checkpoint made it again,
        else ``backward of NODE``; for one of the optimizer ``update of PARAMETER``. The
        operator where there is none of these. Buffers of compiled code have names of their own.
    """
    gradients = _find_gradients(graph)
    return tuple(_label_storage(graph, storage, gradients) for storage in graph.storages)


def label_operator(operation: Operation) -> str:
    """Names an operator, with its overload only where it has several.

    >>> label_operator(Operation(1, "aten.mm.default", Phase.FORWARD))
    'aten.mm'
    """
    return operation.name.removesuffix(".default")


def _label_storage(graph: MemoryGraph, storage: Storage, gradients: Mapping[int, int]) -> str:
    if storage.born < 0:
        return storage.name
    made_by = graph.operations[storage.born]
    if storage.category is Category.TEMPORARY and made_by.phase is Phase.OPTIMIZER:
        updated = find_updated(graph, made_by)
        if updated:
            return f"update of {updated[0] if len(updated) == 1 else f'{len(updated)} parameters'}"
    elif storage.category is Category.TEMPORARY and made_by.phase is Phase.BACKWARD:
        if storage.name and (
            storage.node is None or storage.name != graph.nodes[storage.node].name
        ):
            return storage.name  # a buffer's of compiled code
        if storage.index in gradients:
            return f"gradient of {graph.nodes[gradients[storage.index]].name}"
        if storage.node is not None:
            made = "recompute" if made_by.recomputed else "backward"
            return f"{made} of {graph.nodes[storage.node].name}"
    elif storage.name:
        return storage.name
    return label_operator(made_by)


def _find_gradients(graph: MemoryGraph) -> dict[int, int]:
    """Finds the nodes whose results storages of backward are the gradients of, by storage.

    A node's backward makes the gradients of its inputs, and the backward of those reads them.
    What is only added to another is a part of a gradient; autograd adds up the parts where a
    result was used more than once. Some nodes, such as an addition, hand a gradient on as it is
    and run nothing in backward: then the nodes before them read it first.
    """
    operations = [o for o in graph.operations if o.phase is Phase.BACKWARD and not o.recomputed]
    runs = {o.node for o in graph.operations if o.phase is Phase.BACKWARD}
    known: dict[int, frozenset[int]] = {}

    def find_readers(node: int) -> frozenset[int]:
        if node not in known:
            readers, made = {node}, graph.nodes[node]
            is_differentiable = "float" in (made.dtype or "") and not made.target.startswith(
                "detach"
            )
            if node not in runs and is_differentiable:
                readers.update(*map(find_readers, made.inputs))
            known[node] = frozenset(readers)
        return known[node]

    makers = {o.index: o for o in operations}
    gradients: dict[int, int] = {}
    for operation in operations:
        reader = operation.node
        if reader is None or operation.name in _ADDITIONS:
            continue
        for index in operation.reads:
            storage = graph.storages[index]
            made_by = makers.get(storage.born)
            if index in gradients or made_by is None or storage.category is not Category.TEMPORARY:
                continue
            if made_by.node is None:  # the gradient of the loss, from which backward starts
                gradients[index] = reader
                continue
            inputs = graph.nodes[made_by.node].inputs
            others = (i for i in inputs if i != made_by.node and reader in find_readers(i))
            node = reader if reader in inputs else next(others, None)
            if node is not None:
                gradients[index] = node
    return gradients

"""Labels of storages: their names, and where they have none, what made them.

In forward a storage is called like the node that made it. What backward and the optimizer make
belongs to nodes and parameters too, and is no result of theirs: it gets a label that says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.graph import Category, MemoryGraph, Node, Operation, Phase, Storage

_ADDITIONS = ("aten.add.Tensor", "aten.add_.Tensor")
_OF_PARAMETERS = (Category.GRADIENT, Category.OPTIMIZER_STATE)


def label_storages(graph: MemoryGraph) -> tuple[str, ...]:
    """Labels each storage, by its index; see ``label`` in ``docs/json.md``.

    Args:
        graph: The memory graph of the step.

    Returns:
        The name of the storage; for a temporary of backward ``gradient of NODE`` where it is the
        gradient of that node's result, ``recompute of NODE`` where a checkpoint made it again,
        else ``backward of NODE``; for one of the optimizer ``update of PARAMETER``. The
        operator where there is none of these.
    """
    gradients = _find_gradients(graph)
    return tuple(_label_storage(graph, storage, gradients) for storage in graph.storages)


def find_updated(graph: MemoryGraph, operation: Operation) -> tuple[str, ...]:
    """Finds the parameters whose update an operation of the optimizer is part of.

    Those whose value, gradient or state it reads; where it reads none of these, those that its
    arguments were computed from.

    Args:
        graph: The memory graph of the step.
        operation: One of its operations.

    Returns:
        Their names, in the order of reading; empty outside the optimizer.
    """
    if operation.phase is not Phase.OPTIMIZER:
        return ()
    seen: set[int] = set()
    reads = list(operation.reads)
    while reads:
        storages = [graph.storages[index] for index in reads if index not in seen]
        seen.update(reads)
        owners = dict.fromkeys(filter(None, map(_find_owner, storages)))
        if owners:
            return tuple(owners)
        made_by = [graph.operations[s.born] for s in storages if s.born > 0]
        reads = [i for o in made_by if o.phase is Phase.OPTIMIZER for i in o.reads]
    return ()


def label_operator(operation: Operation) -> str:
    """Names an operator, with its overload only where it has several.

    >>> label_operator(Operation(1, "aten.mm.default", Phase.FORWARD))
    'aten.mm'
    """
    return operation.name.removesuffix(".default")


def _find_owner(storage: Storage) -> str:
    if storage.category is Category.PARAMETER:
        return storage.name
    # "fc.weight.grad", "fc.weight.exp_avg"
    return storage.name.rpartition(".")[0] if storage.category in _OF_PARAMETERS else ""


def _label_storage(graph: MemoryGraph, storage: Storage, gradients: Mapping[int, int]) -> str:
    if storage.born < 0:
        return storage.name
    made_by = graph.operations[storage.born]
    if storage.category is Category.TEMPORARY and made_by.phase is Phase.OPTIMIZER:
        return _label_update(find_updated(graph, made_by)) or label_operator(made_by)
    if storage.category is Category.TEMPORARY and made_by.phase is Phase.BACKWARD:
        return _label_backward(graph, storage, made_by, gradients) or label_operator(made_by)
    return storage.name or label_operator(made_by)


def _label_update(parameters: tuple[str, ...]) -> str:
    if len(parameters) > 1:
        return f"update of {len(parameters)} parameters"
    return f"update of {parameters[0]}" if parameters else ""


def _label_backward(
    graph: MemoryGraph, storage: Storage, made_by: Operation, gradients: Mapping[int, int]
) -> str:
    if storage.index in gradients:
        return f"gradient of {graph.nodes[gradients[storage.index]].name}"
    if storage.node is None:
        return ""
    what = "recompute" if made_by.recomputed else "backward"
    return f"{what} of {graph.nodes[storage.node].name}"


def _find_gradients(graph: MemoryGraph) -> dict[int, int]:
    """The gradients of nodes' results, as they go from one node's backward to the next's.

    A node's backward makes the gradients of its inputs, and the backward of those reads them.
    What is only added to another is a part of a gradient; autograd adds up the parts where a
    result was used more than once.

    Returns:
        Index of the storage to index of the node.
    """
    gradients: dict[int, int] = {}
    receivers = _Receivers(graph)
    for operation in graph.operations:
        if operation.phase is not Phase.BACKWARD or operation.recomputed:
            continue
        if operation.node is None or operation.name in _ADDITIONS:
            continue
        for index in operation.reads:
            made_by = _find_maker(graph, graph.storages[index])
            if index in gradients or made_by is None:
                continue
            node = receivers.find_input(made_by.node, operation.node)
            if node is not None:
                gradients[index] = node
    return gradients


def _find_maker(graph: MemoryGraph, storage: Storage) -> Operation | None:
    """The operation of backward that made a temporary; None for anything else."""
    if storage.born < 0 or storage.category is not Category.TEMPORARY:
        return None
    made_by = graph.operations[storage.born]
    return made_by if made_by.phase is Phase.BACKWARD and not made_by.recomputed else None


class _Receivers:
    """Nodes whose backward may read a gradient first: the node itself, or one before it.

    Some nodes hand a gradient on as it is, such as an addition; they run nothing in backward.
    """

    def __init__(self, graph: MemoryGraph) -> None:
        self._nodes = graph.nodes
        self._runs = {o.node for o in graph.operations if o.phase is Phase.BACKWARD}
        self._found: dict[int, frozenset[int]] = {}

    def find_input(self, node: int | None, reader: int) -> int | None:
        """The input of a node whose gradient the backward of ``reader`` reads."""
        if node is None:  # backward starts from the gradient of the loss, which no node makes
            return reader
        inputs = self._nodes[node].inputs
        if reader in inputs:
            return reader
        return next((i for i in inputs if i != node and reader in self._find(i)), None)

    def _find(self, node: int) -> frozenset[int]:
        if node not in self._found:
            receivers = {node}
            if node not in self._runs and _is_differentiable(self._nodes[node]):
                receivers.update(*map(self._find, self._nodes[node].inputs))
            self._found[node] = frozenset(receivers)
        return self._found[node]


def _is_differentiable(node: Node) -> bool:
    return "float" in (node.dtype or "") and not node.target.startswith("detach")

"""Reasons for which a storage is alive at a moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, MemoryGraph, Node, Operation, Save, Storage

_HOLDERS = {
    Category.PARAMETER: "the model, for good",
    Category.BUFFER: "the model, for good",
    Category.INPUT: "the caller, for the whole step",
    Category.OPTIMIZER_STATE: "the optimizer, for good",
    Category.WORKSPACE: "a library, which keeps it",
    Category.OUTPUT: "a variable of the training loop",
    Category.GRADIENT: "the parameter's .grad",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The life of a storage.

    Attributes:
        maker: The operation that made it; None where it was there before the step.
        saves: Each time that autograd keeps it.
        let_go: The operation in which the user's code lets go of it; None where the code does not,
            or never has it.
        death: The operation after which it is freed; None where it outlives the step.
        is_alive: Whether it is alive at the moment.
        holder: What holds it there, or did so last.
    """

    storage: Storage
    maker: Operation | None
    saves: tuple[Save, ...]
    let_go: Operation | None
    death: Operation | None
    is_alive: bool
    holder: str


def explain_storage(graph: MemoryGraph, index: int, step: int) -> Explanation:
    """Explains the life of a storage, and why it is alive while an operation runs.

    Args:
        graph: The memory graph of the step.
        index: Index of the storage.
        step: Index of the operation.
    """
    storage, operations = graph.storages[index], graph.operations
    saves = tuple(save for save in graph.saves if save.storage == index)
    let_go = graph.let_go[index] if graph.let_go else None
    end = len(operations) if storage.died is None else storage.died
    at = min(max(step, storage.born), end)
    is_result = any(index in node.results for node in graph.nodes)
    is_saved = any(save.position <= at <= (save.released or save.position) for save in saves)
    is_named = is_result and (let_go is None or at <= let_go)
    holders = []
    if storage.born == RESIDENT or storage.category in (Category.GRADIENT, Category.OUTPUT):
        holders.append(_HOLDERS.get(storage.category, "the loop"))
    else:
        if is_saved:
            holders.append("autograd, for backward")
        if is_named:
            holders.append("a variable of the code")
        if storage.cast_until is not None and at <= storage.cast_until:
            holders.append("autocast, which keeps the casts of weights")
    return Explanation(
        storage=storage,
        maker=None if storage.born == RESIDENT else operations[storage.born],
        saves=saves,
        let_go=None if let_go is None else operations[let_go],
        death=None if storage.died is None else operations[storage.died],
        is_alive=storage.born <= step <= end,
        holder=" and ".join(holders) or "the operators that compute with it",
    )


def find_storages(graph: MemoryGraph, labels: tuple[str, ...], node: Node | None) -> list[int]:
    """Finds the storages that a node makes in forward, or else hands on."""
    if node is None:
        return []
    made = [
        s.index for s in graph.storages if s.node == node.index and labels[s.index] == node.name
    ]
    return made or list(node.results)

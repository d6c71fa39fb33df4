"""Holders of a storage: who keeps it alive while an operation runs."""

from __future__ import annotations

from fxmem.graph import RESIDENT, Category, MemoryGraph

_BY_CATEGORY = {
    Category.PARAMETER: "the model, for good",
    Category.BUFFER: "the model, for good",
    Category.INPUT: "the caller, for the whole step",
    Category.OPTIMIZER_STATE: "the optimizer, for good",
    Category.WORKSPACE: "a library, which keeps it",
    Category.OUTPUT: "a variable of the training loop",
    Category.GRADIENT: "the parameter's .grad",
}


def find_holder(graph: MemoryGraph, index: int, step: int) -> str:
    """Finds what holds a storage while an operation runs; if it is gone, what did so last."""
    storage = graph.storages[index]
    if storage.born == RESIDENT or storage.category in (Category.GRADIENT, Category.OUTPUT):
        return _BY_CATEGORY.get(storage.category, "the training loop")
    end = len(graph.operations) if storage.died is None else storage.died
    at = min(max(step, storage.born), end)
    let_go = graph.let_go[index] if graph.let_go else None
    saves = (save for save in graph.saves if save.storage == index)
    holders = []
    if any(save.position <= at <= (save.released or save.position) for save in saves):
        holders.append("autograd, for backward")
    if (let_go is None or at <= let_go) and any(index in node.results for node in graph.nodes):
        holders.append("a variable of the code")
    if storage.cast_until is not None and at <= storage.cast_until:
        holders.append("autocast, which keeps the casts of weights")
    return " and ".join(holders) or "the operators that compute with it"

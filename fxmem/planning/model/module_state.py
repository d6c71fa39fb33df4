"""What nodes change of their modules' state, and whether they draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.graph import RESIDENT, Category, MemoryGraph, Node, Operation, Storage


def is_batch_norm(operation: Operation) -> bool:
    """Whether an operator is one of the batch normalisations, which update running statistics."""
    return "batch_norm" in operation.name


def find_statistics(graph: MemoryGraph, operations: Sequence[Operation]) -> tuple[int, ...]:
    """The buffers that a batch normalisation among a node's operations updates."""
    if not any(is_batch_norm(operation) for operation in operations):
        return ()
    read = (index for o in operations for index in (*o.reads, *o.writes))
    return tuple(
        index for index in dict.fromkeys(read) if graph.storages[index].category is Category.BUFFER
    )


def find_states(graph: MemoryGraph, operations: Sequence[Operation]) -> tuple[int, ...]:
    """What else a node's operations change of its modules, as spectral normalisation does."""
    if any(is_batch_norm(operation) for operation in operations):
        return ()
    written = dict.fromkeys(index for operation in operations for index in operation.writes)
    return tuple(index for index in written if _is_state(graph.storages[index]))


def may_draw(node: Node, operations: Sequence[Operation]) -> bool:
    """Tells whether a node may draw random numbers: a dropout module's share may be set later."""
    return "Dropout" in node.target or any(o.effect is not None for o in operations)


def _is_state(storage: Storage) -> bool:
    """Tells whether a storage is one that a module holds under a name, and no parameter."""
    return (
        storage.born == RESIDENT
        and storage.category is Category.BUFFER
        and all(part.isidentifier() or part.isdigit() for part in storage.name.split("."))
    )

"""A step in which storages share those of older ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fxmem.graph import Category, MemoryGraph, SavedTensor, Storage

_LASTING = (Category.OUTPUT, Category.ACTIVATION)
"""Categories of a result that a temporary takes when the result comes to share its storage."""


def merge_storages(graph: MemoryGraph, merged: Mapping[int, int]) -> MemoryGraph:
    """Merges storages into others, which then hold the tensors of both.

    Args:
        graph: The step without that.
        merged: By index of a storage that is not made, that of an older one that is.
    """
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

    storages, let_go = [], []
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
                saved_by=tuple(dict.fromkeys(n for storage in group for n in storage.saved_by)),
            )
        )
        if graph.let_go:  # of all tensors on them; None for never
            ends = [graph.let_go[storage.index] for storage in group]
            let_go.append(None if None in ends else max(end for end in ends if end is not None))
    saved: dict[int, SavedTensor] = {}
    for tensor in graph.saved:  # each storage once
        saved.setdefault(renamed[tensor.storage], tensor)
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
        saved=tuple(replace(tensor, storage=index) for index, tensor in saved.items()),
        saves=tuple(replace(s, storage=renamed[s.storage]) for s in graph.saves),
        calls=tuple(
            replace(call, inputs=rename(call.inputs), results=rename(call.results))
            for call in graph.calls
        ),
        let_go=tuple(let_go),
        warmup=tuple(
            (old if old is None or old < 0 else renamed[old], nbytes)
            for old, nbytes in graph.warmup
        ),
    )

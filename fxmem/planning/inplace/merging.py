"""A step in which storages lie on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fxmem.graph import Category, MemoryGraph, Storage

_LASTING = (Category.OUTPUT, Category.ACTIVATION)
"""What a storage that was a temporary before becomes with a result that is one of these."""


def merge_storages(graph: MemoryGraph, merged: Mapping[int, int]) -> MemoryGraph:
    """The step in which some storages are not made, since their tensors lie on others.

    Args:
        graph: The step without that.
        merged: By index of a storage that is not made, that of an older one that is.
    """
    parts: dict[int, list[Storage]] = {}
    for storage in graph.storages:
        parts.setdefault(merged.get(storage.index, storage.index), []).append(storage)
    renamed = {old: new for new, old in enumerate(parts)}
    renamed |= {old: renamed[target] for old, target in merged.items()}

    def rename(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(renamed[index] for index in indices))

    lost = [0] * len(graph.nodes)
    for old in merged:
        storage = graph.storages[old]
        if storage.node is not None:
            lost[storage.node] += storage.nbytes
    saved = {s.storage: s for s in reversed(graph.saved)}
    first = {renamed[s.storage]: s for s in reversed(graph.saved)}  # each storage once
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
        storages=tuple(_merge(renamed[old], group) for old, group in parts.items()),
        operations=tuple(
            replace(
                operation,
                reads=rename(operation.reads),
                writes=rename(operation.writes),
                overwritable=rename(operation.overwritable),
            )
            for operation in graph.operations
        ),
        saved=tuple(
            replace(s, storage=renamed[s.storage])
            for s in saved.values()
            if first[renamed[s.storage]] is s
        )[::-1],
        saves=tuple(replace(s, storage=renamed[s.storage]) for s in graph.saves),
        calls=tuple(
            replace(call, inputs=rename(call.inputs), results=rename(call.results))
            for call in graph.calls
        ),
        let_go=tuple(_find_last(graph.let_go, group) for group in parts.values())
        if graph.let_go
        else (),
        warmup=tuple(
            (old if old is None or old < 0 else renamed[old], nbytes)
            for old, nbytes in graph.warmup
        ),
    )


def _find_last(let_go: Sequence[int | None], parts: list[Storage]) -> int | None:
    """When the user's code lets go of the last tensor on one of some storages; None for never."""
    ends = [end for storage in parts if (end := let_go[storage.index]) is not None]
    return max(ends) if len(ends) == len(parts) else None


def _merge(index: int, parts: list[Storage]) -> Storage:
    oldest = parts[0]
    last = max(parts, key=lambda s: (s.died is None, s.died or 0, s.death_rank))
    categories = {storage.category for storage in parts}
    return replace(
        oldest,
        index=index,
        category=next((c for c in _LASTING if c in categories), oldest.category),
        died=last.died,
        death_rank=last.death_rank,
        saved_by=tuple(dict.fromkeys(node for storage in parts for node in storage.saved_by)),
    )

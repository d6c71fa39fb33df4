"""The last micro-batch of a step that accumulates gradients: the part of the step that is planned.

A recorded step that accumulates holds two micro-batches (:mod:`fxmem.training.step`): the first
makes the gradients, and only the last is traced. All micro-batches run the same forward, so a plan
applies to each. In the last one every gradient exists from the beginning, and whatever the loop
keeps of the micro-batch before is alive: at no point does an earlier one hold more.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fxmem.analysis import Analysis
from fxmem.graph import RESIDENT, MemoryGraph, Phase
from fxmem.memory.timeline import build_timeline


def take_last_micro_batch(analysis: Analysis) -> Analysis:
    """Takes the last micro-batch of an analysed step, and the optimizer's update after it."""
    start = find_last_micro_batch(analysis.graph)
    return analysis if start == 0 else replace(analysis, graph=_cut_graph(analysis.graph, start))


def find_last_micro_batch(graph: MemoryGraph) -> int:
    """Finds the operation that begins the last micro-batch; 0 where there is but one."""
    starts = (
        operation.index
        for before, operation in pairwise(graph.operations)
        if before.phase is Phase.BACKWARD and operation.phase is Phase.FORWARD
    )
    return max(starts, default=0)


def repeat_flops(graph: MemoryGraph, times: int) -> MemoryGraph:
    """Gives each operation of a micro-batch the FLOPs of that operation in all of them."""
    operations = (
        operation
        if operation.phase is Phase.OPTIMIZER
        else replace(operation, flops=operation.flops * times)
        for operation in graph.operations
    )
    return graph if times == 1 else replace(graph, operations=tuple(operations))


def _cut_graph(graph: MemoryGraph, start: int) -> MemoryGraph:
    """Removes the operations before ``start``, except ``step.begin``.

    Storages keep their indices: what is alive at ``start`` becomes resident, and what is freed
    before takes no bytes. Their allocations and frees become part of the warmup.
    """

    def move(operation: int | None) -> int | None:
        return None if operation is None else max(operation - start + 1, 0)

    gone = {s.index for s in graph.storages if s.died is not None and s.died < start}
    storages = tuple(
        replace(
            storage,
            nbytes=0 if storage.index in gone else storage.nbytes,
            born=RESIDENT if storage.born < start else storage.born - start + 1,
            died=move(storage.died),
            cast_until=move(storage.cast_until),
        )
        for storage in graph.storages
    )
    # Storages that are gone, then workspaces, have negative names that are new to the warmup.
    first = 1 + max((~storage for storage, _ in graph.warmup if storage is not None), default=0)
    names = {index: ~(first + at) for at, index in enumerate(sorted(gone))}
    streams = dict(graph.warmup_streams)
    streams.update((names[i], graph.storages[i].stream) for i in gone if graph.storages[i].stream)
    blocks: dict[tuple[int, int], int] = {}

    def name(storage: int | None) -> int | None:
        return storage if storage is None else names.get(storage, storage)

    warmup = [(name(storage), nbytes) for storage, nbytes in graph.warmup]
    for event in build_timeline(graph).events:
        if event.step >= start:
            break
        storage = name(event.storage)
        if storage is None:
            key = event.block, event.stream
            storage = blocks.setdefault(key, ~(first + len(names) + len(blocks)))
            if event.stream:
                streams[storage] = event.stream
        warmup.append((storage, event.delta_bytes))
    kept = graph.operations[start:]
    return replace(
        graph,
        storages=storages,
        operations=(
            graph.operations[0],
            *(replace(operation, index=at) for at, operation in enumerate(kept, 1)),
        ),
        saves=tuple(
            replace(
                save,
                position=save.position - start + 1,
                unpacked=move(save.unpacked),
                released=move(save.released),
                returned=move(save.returned),
            )
            for save in graph.saves
        ),
        warmup=tuple(warmup) if graph.warmup else (),
        warmup_streams=tuple(streams.items()),
        let_go=tuple(map(move, graph.let_go)),
        first_operations=(),
    )

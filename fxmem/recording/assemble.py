"""Assembly of the memory graph from a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxmem.graph import (
    Category,
    MemoryGraph,
    ModuleCall,
    Node,
    Phase,
    Save,
    SavedTensor,
    Storage,
)
from fxmem.recording.recorder import NodeRecord, Recorder
from fxmem.recording.saves import SaveRecord
from fxmem.tracing.calls import CallLog
from fxmem.tracing.nodes import TracedNode

_LISTED = (Category.PARAMETER, Category.BUFFER, Category.INPUT)
"""Categories of storages that are listed as saved, but not counted: they are there anyway."""
_HIDDEN = "it is also called where its calls are not seen: in a checkpoint, a leaf or the loss"


def assemble_graph(
    recorder: Recorder, traced: Sequence[TracedNode], log: CallLog | None = None
) -> MemoryGraph:
    """Builds the memory graph of a recorded step.

    Args:
        recorder: After the step.
        traced: The nodes of the model and of the loss.
        log: The calls of its modules.
    """
    _categorise(recorder)
    storages = tuple(
        Storage(
            index=index,
            nbytes=storage.nbytes,
            category=storage.category,
            name=storage.name or _name_storage(storage.node, traced),
            shape=storage.shape,
            dtype=storage.dtype,
            born=storage.born,
            died=storage.died,
            node=storage.node,
            saved_by=tuple(storage.saved_by),
            death_rank=storage.death_rank,
            cast_until=storage.cast_until,
        )
        for index, storage in enumerate(recorder.ledger.storages)
    )
    saved = tuple(_describe_saved(recorder, traced))
    return MemoryGraph(
        nodes=_measure_nodes(recorder, traced),
        storages=storages,
        operations=tuple(recorder.operations),
        saved=saved,
        warmup=tuple(recorder.ledger.warmup),
        saves=tuple(_list_saves(recorder)),
        calls=() if log is None else tuple(_list_calls(log)),
        let_go=tuple(_list_let_go(recorder)),
        first_operations=tuple(recorder.first_step.list_operations(recorder.operations)),
    )


def _list_calls(log: CallLog) -> Iterator[ModuleCall]:
    for call in log.calls:
        yield replace(call, obstacle=_HIDDEN) if call.fqn in log.hidden else call


def _list_let_go(recorder: Recorder) -> Iterator[int | None]:
    held = recorder.user_references.held
    for index in range(len(recorder.ledger.storages)):
        yield None if index in held else recorder.user_references.let_go.get(index)


def _categorise(recorder: Recorder) -> None:
    for saved in recorder.saving.saved:
        storage = recorder.ledger.storages[saved.storage]
        if storage.category in (Category.TEMPORARY, Category.OUTPUT):
            storage.category = Category.ACTIVATION


def _name_storage(node: int | None, traced: Sequence[TracedNode]) -> str:
    return traced[node].name if node is not None else ""


def _describe_saved(recorder: Recorder, traced: Sequence[TracedNode]) -> list[SavedTensor]:
    described = []
    for saved in recorder.saving.saved:
        node = None if saved.node is None else traced[saved.node]
        storage = recorder.ledger.storages[saved.storage]
        described.append(
            SavedTensor(
                node=node.name if node else "",
                fqn=node.fqn if node else "",
                shape=saved.shape,
                dtype=saved.dtype,
                nbytes=storage.nbytes,
                source=node.source if node else None,
                storage=saved.storage,
                category=storage.category,
            )
        )
    return described


def _list_saves(recorder: Recorder) -> Iterator[Save]:
    saves = [*_iterate_saves(recorder)]
    released = _find_releases(recorder, saves)
    for save in saves:
        unpacked, _ = recorder.sequences.ran.get(save.sequence, (None, None))
        unpacked = recorder.sequences.copied.get(save.sequence, unpacked)
        last = returned = released.get(save.sequence)
        if last is not None:
            returned = min(last, recorder.sequences.returned.get(save.sequence, last))
        yield Save(save.storage, save.node, save.position, unpacked, last, returned)


def _iterate_saves(recorder: Recorder) -> Iterator[SaveRecord]:
    """Yields the saves by the functions that run: for an operator in place on a view, CopySlices.

    Autograd makes it right after the operator's own function, or the copy that this one saves.
    """
    copies = recorder.saving.copies
    runs = {
        sequence - 1 - (sequence - 1 in copies): sequence for sequence in recorder.sequences.copied
    }
    for save in recorder.saving.saves:
        yield replace(save, sequence=runs.get(save.sequence, save.sequence))


def _find_releases(recorder: Recorder, saves: Sequence[SaveRecord]) -> dict[int, int]:
    """Finds by autograd function the operation of its backward after which it releases its saves.

    This is its last operation, unless the engine adds up gradients in its name afterwards: then
    the deaths of its saves tell.
    """
    last = {sequence: last for sequence, (_, last) in recorder.sequences.ran.items()}
    holders: dict[int, int] = {}  # by storage, the function that releases it last
    for save in saves:
        if save.sequence in last:
            holder = holders.get(save.storage, save.sequence)
            holders[save.storage] = max(holder, save.sequence, key=last.__getitem__)
    seen: dict[int, int] = {}
    for index, sequence in holders.items():
        died = recorder.ledger.storages[index].died
        if died is not None and recorder.sequences.ran[sequence][0] <= died <= last[sequence]:
            seen[sequence] = max(died, seen.get(sequence, died))
    return last | seen


def _measure_nodes(recorder: Recorder, traced: Sequence[TracedNode]) -> tuple[Node, ...]:
    forward_flops, backward_flops = [0] * len(traced), [0] * len(traced)
    for operation in recorder.operations:
        if operation.node is not None:
            backward = operation.phase is Phase.BACKWARD
            (backward_flops if backward else forward_flops)[operation.node] += operation.flops
    saved_bytes = [0] * len(traced)
    for saved in recorder.saving.saved:
        storage = recorder.ledger.storages[saved.storage]
        if saved.node is not None and storage.category not in _LISTED:
            saved_bytes[saved.node] += storage.nbytes
    nodes = []
    for node in traced:
        record = recorder.node_records.get(node.index, NodeRecord())
        nodes.append(
            Node(
                index=node.index,
                name=node.name,
                fqn=node.fqn,
                op=node.op,
                target=node.target,
                phase=node.phase,
                shape=node.shape,
                dtype=node.dtype,
                source=node.source,
                inputs=node.inputs,
                output_bytes=record.output_bytes,
                saved_bytes=saved_bytes[node.index],
                transient_bytes=record.transient_bytes,
                forward_flops=forward_flops[node.index],
                backward_flops=backward_flops[node.index],
                results=record.results,
                early_backward=node.index in recorder.sequences.early,
            )
        )
    return tuple(nodes)

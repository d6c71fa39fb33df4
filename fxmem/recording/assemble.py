"""Assembly of the memory graph from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxmem.graph import (
    Category,
    MemoryGraph,
    Node,
    Phase,
    SavedTensor,
    Storage,
)
from fxmem.recording.recorder import NodeRecord, Recorder
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
    ledger, references = recorder.ledger, recorder.user_references
    for first in recorder.autograd.saved:
        kept = ledger.storages[first.storage]
        if kept.category in (Category.TEMPORARY, Category.OUTPUT):
            kept.category = Category.ACTIVATION
    calls = () if log is None else log.calls
    hidden = set() if log is None else log.hidden
    held = references.held
    storages = tuple(
        Storage(
            index=index,
            nbytes=storage.nbytes,
            category=storage.category,
            name=storage.name or ("" if storage.node is None else traced[storage.node].name),
            shape=storage.shape,
            dtype=storage.dtype,
            born=storage.born,
            died=storage.died,
            node=storage.node,
            saved_by=tuple(storage.saved_by),
            death_rank=storage.death_rank,
            cast_until=storage.cast_until,
            stream=storage.stream,
        )
        for index, storage in enumerate(ledger.storages)
    )
    return MemoryGraph(
        nodes=_measure_nodes(recorder, traced),
        storages=storages,
        operations=tuple(recorder.operations),
        saved=_describe_saved(recorder, traced),
        warmup=tuple(ledger.warmup),
        saves=tuple(recorder.autograd.list_saves()),
        calls=tuple(replace(c, obstacle=_HIDDEN) if c.fqn in hidden else c for c in calls),
        let_go=tuple(
            None if index in held else references.let_go.get(index)
            for index in range(len(ledger.storages))
        ),
        first_operations=tuple(recorder.first_step.list_operations(recorder.operations)),
        warmup_streams=ledger.warmup_streams,
    )


def _describe_saved(recorder: Recorder, traced: Sequence[TracedNode]) -> tuple[SavedTensor, ...]:
    described = []
    for saved in recorder.autograd.saved:
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
    return tuple(described)


def _measure_nodes(recorder: Recorder, traced: Sequence[TracedNode]) -> tuple[Node, ...]:
    forward_flops, backward_flops = [0] * len(traced), [0] * len(traced)
    for operation in recorder.operations:
        if operation.node is not None:
            backward = operation.phase is Phase.BACKWARD
            (backward_flops if backward else forward_flops)[operation.node] += operation.flops
    saved_bytes = [0] * len(traced)
    for saved in recorder.autograd.saved:
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
                early_backward=node.index in recorder.autograd.early,
                remark=record.remark,
            )
        )
    return tuple(nodes)

"""The memory snapshot that PyTorch would have written of a step."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError
from fxmem.graph import Category
from fxmem.memory.allocation import trace_blocks
from fxmem.memory.allocator.heap import SegmentState, TraceAction
from fxmem.memory.labels import label_operator
from fxmem.memory.timeline import Action, Event

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

PROTOCOL = 4  # the latest of pickle that pytorch.org/memory_viz reads
_POOL = (0, 0)


def write_snapshot(analysis: Analysis) -> bytes:
    """Writes the file that ``torch.cuda.memory._dump_snapshot`` would have written after a step."""
    return pickle.dumps(build_snapshot(analysis), PROTOCOL)


def build_snapshot(analysis: Analysis) -> dict[str, Any]:
    """Builds what ``torch.cuda.memory._snapshot`` would have returned after a step.

    The trace begins with what was there before, so that viewers know what it is. As in PyTorch,
    events have the sizes of requests; the blocks are in the segments. A saved report of a step
    on CUDA, which does not say where blocks lie, is refused.

    Source of the format: ``torch/csrc/cuda/memory_snapshot.cpp``, ``torch/cuda/memory.py``.
    """
    if analysis.settings is None and analysis.setup.device == "cuda":
        cause = "a saved report lacks the addresses of CUDA's blocks"
        raise UsageError(cause, hint="name the model instead")
    trace = trace_blocks(analysis.graph, analysis.settings)
    events = []
    for place in trace.residents:
        stack = [{"filename": "fxmem", "line": 0, "name": analysis.labels[place.storage]}]
        category = _find_category(analysis, place.storage)
        block = place.address, place.nbytes, analysis.graph.storages[place.storage].stream
        events.append(
            _write_event(TraceAction.ALLOC.value, block, stack, category, "before the step")
        )
    last, stack = -1, []
    for happened, index in trace.events:
        event = analysis.timeline.events[index]
        if index != last:
            last, stack = index, _write_stack(analysis, event)
        names = [happened.action.value]
        if happened.action is TraceAction.FREE:  # viewers wait for the one before they do the other
            names.insert(0, "free_requested")
        for name in names:
            is_block = not name.startswith("segment")
            category = _find_category(analysis, event.storage) if is_block else ""
            block = happened.address, happened.nbytes, happened.stream
            events.append(_write_event(name, block, stack, category, event.phase.value))
    origins = {e["addr"]: e["frames"] for e in events if e["action"] == TraceAction.ALLOC.value}
    # The viewer knows colours for categories only where one of them is called unknown.
    events.append(_write_event("snapshot", (0, 0, 0), [], "unknown"))
    return {
        "segments": [_write_segment(segment, origins) for segment in trace.segments],
        "device_traces": [events],
    }


def _write_stack(analysis: Analysis, event: Event) -> list[dict[str, Any]]:
    """Writes the frames of an event as viewers show them: the user's line, then the action."""
    operation = analysis.graph.operations[event.step]
    operator = label_operator(operation)
    if event.storage is None:
        what = f"workspace of {operator}"
    elif event.action is Action.ALLOC:
        what = f"{operator} makes {analysis.labels[event.storage]}"
    else:
        what = f"{analysis.labels[event.storage]} freed after {operator}"
    name = f"{operation.phase.value}: {what}"
    step: dict[str, Any] = {"filename": "fxmem", "line": event.step, "name": name}
    if operation.node is None:
        return [step]
    node = analysis.nodes[operation.node]
    fields, source = {"fx_node_op": node.op, "fx_node_name": node.name}, node.source
    if source is None:
        return [{**step, **fields}]
    name = source.function or node.name
    return [{"filename": source.file, "line": source.line, "name": name, **fields}, step]


def _find_category(analysis: Analysis, storage: int | None) -> str:
    category = Category.WORKSPACE
    if storage is not None:
        category = analysis.graph.storages[storage].category
    return category.value.lower()


def _write_event(
    action: str,
    block: tuple[int, int, int],
    stack: list[dict[str, Any]],
    category: str,
    metadata: str = "",
) -> dict[str, Any]:
    address, nbytes, stream = block
    event = {"action": action, "addr": address, "size": nbytes, "stream": stream, "frames": stack}
    if category:
        event["category"] = category
    return {**event, "user_metadata": metadata, "pool_id": _POOL}


def _write_segment(
    segment: SegmentState, origins: dict[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    allocated = sum(block.size for block in segment.blocks if block.allocated)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": origins.get(block.address, []) if block.allocated else [],
            }
            for block in segment.blocks
        ],
    }

"""FX101: logits of a large vocabulary, and the cross entropy that is computed of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fxmem.advice.editing import FORWARD, MATMULS, StepEdit, reads_parameter
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import RESIDENT, Operation, Storage
from fxmem.units import format_bytes

_CHUNKS = 8


def find_logits(analysis: Analysis) -> Iterator[Finding]:
    """Simulates head and cross entropy in parts, one after another, each in a checkpoint."""
    edit = StepEdit(analysis)
    alive = {storage.index for storage in analysis.peak.live}
    held: list[Storage] = []
    source = None
    for softmax in [o for o in edit.graph.operations if o.name == "aten._log_softmax.default"]:
        if softmax.node is None or softmax.phase not in FORWARD or not softmax.reads:
            continue
        scores = edit.graph.storages[softmax.reads[0]]
        traced = edit.trace_back(scores)
        if traced is not None and reads_parameter(edit, traced[0]):
            held += (s for s in _chunk(edit, scores, traced[0]) if s.index in alive)
            own, head = edit.nodes[softmax.node], edit.nodes[traced[0].node or 0]
            source = own.source or head.source  # a loss that is named has no line of the user's
    if not held:
        return
    yield edit.make_finding(
        code="FX101",
        change=f"Compute the head and the cross entropy together in {_CHUNKS} parts of the "
        f"tokens: {len(held)} tensors as large as the logits hold "
        f"{format_bytes(sum(s.nbytes for s in held))} at the peak",
        option="sum(checkpoint(head_loss, x, y, use_reentrant=False) for x, y in "
        f"zip(hidden.chunk({_CHUNKS}), targets.chunk({_CHUNKS}))) / targets.numel()",
        cost="The head's forward runs twice, and no logits are returned.",
        source=source,
    )


def _chunk(edit: StepEdit, scores: Storage, product: Operation) -> Iterator[Storage]:
    """Edits one head and its loss; yields the storages that only a part is there of at a time."""
    size, operations = 0.9 * prod(scores.shape), edit.graph.operations
    family, ran = edit.follow(product, size)
    nodes, end = {operation.node for operation in ran}, ran[-1].index
    backward = edit.list_backward(nodes)
    if not backward:
        return
    head = edit.list_backward({product.node})
    begin, last = backward[0].index, (head or backward)[-1].index
    for operation in backward:
        if operation.node != product.node:
            family += (s for s in edit.made.get(operation.index, ()) if prod(s.shape) >= size)
    for storage in family:
        part = -(-storage.nbytes // _CHUNKS)
        died = storage.died if storage.died is not None else last
        if operations[storage.born].phase in FORWARD:
            edit.change(storage.index, nbytes=part, died=min(died, end))
            if storage.saved_by:
                edit.add(part, begin, died)
        else:
            edit.change(storage.index, nbytes=part)
    # The gradients of the weight and of the hidden states are added up over the parts.
    products = [operation.index for operation in head if operation.name in MATMULS]
    for operation in head:
        for storage in edit.made.get(operation.index, ()):
            if operation.index in products:
                edit.add(storage.nbytes, begin, products[-1] + 1)
                if not reads_parameter(edit, operation):  # two of the weight's, and their sum
                    edit.add(storage.nbytes, products[-1] + 1, products[-1] + 1)
    for index in product.reads if products else ():  # what the parts are computed of again
        born = edit.storages[index].born
        for source in (index, *(() if born == RESIDENT else operations[born].reads)):
            edit.keep(source, products[-1])
    yield from family

"""FX101, FX102, FX103: what a loss in parts and other kernels would not keep for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from fxmem.advice.editing import CAST, FORWARD, MATMULS, StepEdit, reads_parameter
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import RESIDENT, Node, Operation, Phase, SourceLocation, Storage
from fxmem.units import format_bytes

_CHUNKS = 8

_HALVES = ("float16", "bfloat16")
_MOST_NODES = 12
_CAST_CALL_CAST = 3
_FLOAT = 4
_NORM = "F.rms_norm(x, x.shape[-1:], weight, eps), or torch.nn.RMSNorm"
_BY_RESULT = {"softmax", "log_softmax", "sigmoid", "tanh", "exp", "relu"}
"""Functions whose derivative is computed of their result."""
_SAME = "the function of x itself: CUDA's kernels compute in float32 inside"
_OTHER = "torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)"

_SOFTMAXES = ("aten._softmax.default", "aten._safe_softmax.default")
_SCALINGS = ("aten.mul.Tensor", "aten.div.Tensor")
_BY_HAND = "it is written as products and a softmax"
_PADDED, _GROUPED = "head dimension that is", "as many heads"
_COPIES = {_PADDED: 3, _GROUPED: 2}
"""By a part of the reason, the copies of query, key and value that the mended code keeps."""
_CURES = {
    _BY_HAND: "F.scaled_dot_product_attention(query, key, value, attn_mask=mask)",
    "asks for its weights": "attention(x, x, x, need_weights=False)",
    "to be enabled": "leave out torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    _PADDED: "a head dimension that is a multiple of 8, or F.pad(x, (0, -dim % "
    "8)) of query, key and value, with scale=dim**-0.5",
    _GROUPED: "key.repeat_interleave(groups, 1) and the same for value instead of "
    "enable_gqa=True, or run attention in bfloat16",
    "4 dimensions": "x.unsqueeze(0) of query, key and value",
    "16 bytes": "x.clone() of query, key and value",
    "contiguous": "x.contiguous() of query, key, value and mask",
    "float16": "x.to(torch.float16) of query, key and value",
}
"""By a part of the reason, the code to write."""
_NEEDS = "what the fused kernels need: fxmem explain FX103"


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
            family += edit.list_results(operation, size)
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


def find_upcasts(analysis: Analysis) -> Iterator[Finding]:
    """Simulates kernels that take halves in place of casts that are kept for backward."""
    edit = StepEdit(analysis)
    users: dict[int, list[Node]] = {}
    for node in edit.nodes:
        for index in dict.fromkeys(node.inputs):
            users.setdefault(index, []).append(node)
    found = list[tuple[int, str, SourceLocation | None]]()
    for node in edit.nodes:
        casts = [
            storage
            for operation in edit.list_forward({node.index})
            if operation.name == CAST and operation.reads
            for storage in edit.made.get(operation.index, ())
            if edit.graph.storages[operation.reads[0]].dtype in _HALVES
        ]
        is_cast = len(edit.list_forward({node.index})) == len(casts) == 1
        is_cast = is_cast and casts[0].dtype == "float32"
        region = _find_region(edit, node, users) if is_cast else set[int]()
        made = [s for o in edit.list_forward(region) for s in edit.made.get(o.index, ())]
        kept_bytes = sum(storage.nbytes for storage in made if storage.saved_by)
        if not kept_bytes:
            continue
        names = {edit.nodes[index].target for index in region}
        is_single = len(region) == _CAST_CALL_CAST
        code = _NORM if "rsqrt" in names else _SAME if is_single else _OTHER
        statistics_bytes = _FLOAT * prod(casts[0].shape[:-1])
        by_result = is_single and bool(names & _BY_RESULT)
        edit.fuse(region, statistics_bytes, keeps_inputs=not by_result, keeps_results=by_result)
        found.append((kept_bytes, code, node.source))
    if not found:
        return
    count, nbytes = len(found), sum(kept_bytes for kept_bytes, _, _ in found)
    copies = f"casts to float32 in {count} places keep" if count > 1 else "a cast to float32 keeps"
    _, code, source = max(found, key=lambda row: row[0])
    yield edit.make_finding(
        code="FX102",
        change="Let kernels take the activation in half precision: "
        f"{copies} {format_bytes(nbytes)} for backward",
        option=code,
        cost="The function runs twice."
        if code == _OTHER
        else "None in time: it is faster; the last digits differ.",
        source=source,
    )


def _find_region(edit: StepEdit, cast: Node, users: dict[int, list[Node]]) -> set[int]:
    """Finds the nodes from a cast to the casts back, and a product with a weight after these.

    Empty where they are many, as in a loss, or multiply matrices.
    """
    region, waiting, ends = {cast.index}, [cast], list[Node]()
    while waiting:
        for user in users.get(waiting.pop().index, ()):
            if user.index in region:
                continue
            region.add(user.index)
            if user.dtype in _HALVES:
                ends.append(user)
            else:
                waiting.append(user)
        if len(region) > _MOST_NODES:
            return set()
    if not ends or any(operation.name in MATMULS for operation in edit.list_forward(region)):
        return set()
    for end in ends:
        after = [user for user in users.get(end.index, ()) if user.fqn == cast.fqn]
        if len(after) == 1 and after[0].target == "mul":
            scaling = edit.list_forward({after[0].index})
            region |= {after[0].index} if any(reads_parameter(edit, o) for o in scaling) else set()
    return region


def find_attention(analysis: Analysis) -> Iterator[Finding]:
    """Simulates a fused kernel in place of scores that are computed as a whole."""
    edit = StepEdit(analysis)
    reasons: Counter[str] = Counter()
    sources: dict[str, SourceLocation | None] = {}
    for softmax in [o for o in edit.graph.operations if o.name in _SOFTMAXES]:
        if softmax.node is None or softmax.phase is not Phase.FORWARD or not softmax.reads:
            continue
        node, scores = edit.nodes[softmax.node], edit.graph.storages[softmax.reads[0]]
        traced = edit.trace_back(scores)
        if traced is None or reads_parameter(edit, traced[0]):
            continue
        if any(operation.name == "aten.tanh.default" for operation in traced[1]):
            continue  # no fused kernel of PyTorch caps scores
        size = 0.9 * prod(scores.shape)
        family, ran = edit.follow(traced[0], size)
        if not any(o.name in MATMULS and o is not traced[0] for o in ran):
            continue
        reason = node.remark
        if not reason:
            reason = "it asks for its weights" if node.op == "call_module" else _BY_HAND
        reasons[reason] += sum(storage.nbytes for storage in family)
        sources.setdefault(reason, node.source)
        nodes = {operation.node for operation in ran if operation.node is not None}
        if all(edit.nodes[index].op != "call_module" for index in nodes):
            kept_bytes = prod(scores.shape[:-1]) * _FLOAT
            copies = next((n for part, n in _COPIES.items() if part in reason), 0)
            kept_bytes += copies * sum(s.nbytes for s in edit.made.get(ran[-1].index, ()))
            edit.fuse(nodes | _find_scaling(edit, nodes), kept_bytes)
            _drop_copy(edit, ran[-1])
            continue
        # A leaf's backward is that of its projections too: only scores and their like go.
        for operation in (*edit.list_forward(nodes), *edit.list_backward(nodes)):
            for storage in edit.made.get(operation.index, ()):
                if storage.shape[-2:] == scores.shape[-2:]:
                    edit.change(storage.index, nbytes=0)
                    edit.clear_workspace(operation.index)
    if not reasons:
        return
    ((reason, _),) = reasons.most_common(1)
    yield edit.make_finding(
        code="FX103",
        change=f"Let a fused kernel compute attention, whose scores are kept because {reason}",
        option=next((cure for part, cure in _CURES.items() if part in reason), _NEEDS),
        cost="None in time: it is faster; the last digits differ.",
        source=sources[reason],
    )


def _find_scaling(edit: StepEdit, nodes: set[int]) -> set[int]:
    """Finds nodes that only scale what attention reads, as a fused kernel does by itself."""
    read = {index for operation in edit.list_forward(nodes) for index in operation.reads}
    makers = (edit.find_maker(edit.graph.storages[index]) for index in read)
    return {
        maker.node
        for maker in makers
        if maker is not None and maker.node is not None and maker.name in _SCALINGS
        if len(maker.reads) == 1 and edit.nodes[maker.node].op != "call_module"
    }


def _drop_copy(edit: StepEdit, product: Operation) -> None:
    """Makes a fused kernel write its result in place of the product's transposed copy."""
    for storage in edit.made.get(product.index, ()):
        for reader in edit.readers.get(storage.index, ()):
            if reader.name == "aten.clone.default" and reader.node != product.node:
                for copy in edit.made.get(reader.index, ()):
                    edit.change(copy.index, born=storage.born)
                    edit.keep(copy.index, edit.storages[storage.index].died or copy.born)
                    edit.change(storage.index, nbytes=0)
                return

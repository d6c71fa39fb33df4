"""FX103: attention that keeps its scores, in PyTorch's math kernel or written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from fxmem.advice.editing import MATMULS, StepEdit, reads_parameter
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import Operation, Phase, SourceLocation

_SOFTMAXES = ("aten._softmax.default", "aten._safe_softmax.default")
_SCALINGS = ("aten.mul.Tensor", "aten.div.Tensor")
_FLOAT = 4
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
_OTHER = "what the fused kernels need: fxmem explain FX103"


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
        option=next((cure for part, cure in _CURES.items() if part in reason), _OTHER),
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

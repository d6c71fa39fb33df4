"""FX102: activations in half precision that are cast to float32, and kept so for backward."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fxmem.advice.editing import CAST, MATMULS, StepEdit, reads_parameter
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import Node, SourceLocation
from fxmem.units import format_bytes

_HALVES = ("float16", "bfloat16")
_MOST_NODES = 12
_CAST_CALL_CAST = 3
_FLOAT = 4
_NORM = "F.rms_norm(x, x.shape[-1:], weight, eps), or torch.nn.RMSNorm"
_BY_RESULT = {"softmax", "log_softmax", "sigmoid", "tanh", "exp", "relu"}
"""Functions whose derivative is computed of their result."""
_SAME = "the function of x itself: CUDA's kernels compute in float32 inside"
_OTHER = "torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)"


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

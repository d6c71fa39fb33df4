"""The content of a report, before it takes a format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fxmem.finding import Finding
from fxmem.graph import Category, Node, Phase, SourceLocation
from fxmem.memory.labels import label_operator
from fxmem.report.text import write_fit

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.setup import Setup

_ALIKE = 0.01  # share of the peak by which the first step's may differ without a word


_WAYS_TO_A_GRAPH = {
    "Cache in the output": "; pass use_cache=False (--input use_cache=False) for finer ones",
    "changes what it holds in its forward": " (of whole graphs if only the model's first call"
    " changes it, as that of transformers' ViT does: call it once before)",
}
"""By a part of the reason why there is no graph: a way to one."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The peak, and its place in the step: in the optimizer, the parameters that it updates."""

    peak_bytes: int
    phase: Phase
    node: str | None
    source: SourceLocation | None
    optimizer: str | None = None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A figure, or the ends of a range, and the call or program that reports it on the device."""

    label: str
    least_bytes: int
    most_bytes: int
    compare_with: str


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A storage that is alive at the peak, or the workspace of the kernel that runs there."""

    nbytes: int
    category: Category
    label: str
    shape: tuple[int, ...] | None  # of the first tensor on it; None for a workspace
    dtype: str  # empty for a workspace
    source: SourceLocation | None  # where it was made; of a parameter, where its module first runs
    saved_by: tuple[str, ...] = ()
    fqn: str = ""  # of the module that made it or that it belongs to; empty for the model itself


@dataclass(frozen=True, slots=True)
class NodeRow(Node):
    """A node, and the bytes alive at the peak of its result, its backward and its workspace."""

    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """The content of one analysis's report."""

    headline: Headline
    setup: Setup
    nodes: tuple[NodeRow, ...]  # in order of execution
    breakdown: Mapping[Category, int]  # bytes at the peak, largest first; sums to it; no zeros
    live: tuple[LiveRow, ...]  # at the peak, largest first; sums to it
    storage_bytes: tuple[int, ...]  # by the index of storages (``NodeRow.results``)
    totals: Mapping[str, int]  # bytes of parameters and the like, over the whole step
    forward_flops: int = 0  # of forward and loss
    backward_flops: int = 0
    device: tuple[DeviceRow, ...] = ()  # to compare with the device's own; none on the CPU
    fit: str = ""  # whether it fits the target GPU, in a sentence
    first_step: Headline | None = None  # where it differs from the second's, the headline, by 1 %
    findings: tuple[Finding, ...] = ()  # largest saving first
    notes: tuple[str, ...] = ()  # on the figures, a sentence each


def build_document(analysis: Analysis) -> Document:
    """Collects the content of an analysis's report."""
    peak, optimizer = analysis.peak, analysis.setup.optimizer
    node = peak.node.name if peak.node else None
    first, first_step = analysis.first_step, None
    if first is not None and abs(first.peak_bytes - peak.nbytes) > _ALIKE * peak.nbytes:
        first_step = Headline(first.peak_bytes, first.phase, first.node, first.source, optimizer)
    totals = {
        "parameters": analysis.parameter_bytes,
        "buffers": analysis.buffer_bytes,
        "inputs": analysis.input_bytes,
        "saved for backward": analysis.saved_bytes,
        "gradients": analysis.gradient_bytes,
        "optimizer state": analysis.optimizer_state_bytes,
        "KV cache, at most": analysis.kv_cache_bytes,
    }
    breakdown = sorted(analysis.breakdown.items(), key=lambda row: -row[1])
    return Document(
        headline=Headline(peak.nbytes, peak.phase, node, peak.source, optimizer, peak.parameters),
        setup=analysis.setup,
        nodes=tuple(_list_nodes(analysis)),
        breakdown={category: nbytes for category, nbytes in breakdown if nbytes},
        # The sort is stable: storages of one size stay in their order of allocation.
        live=tuple(sorted(_list_live(analysis), key=lambda row: -row.nbytes)),
        storage_bytes=tuple(storage.nbytes for storage in analysis.allocated_graph.storages),
        totals={label: nbytes for label, nbytes in totals.items() if nbytes},
        forward_flops=analysis.forward_flops,
        backward_flops=analysis.backward_flops,
        device=tuple(_list_device(analysis)),
        fit=write_fit(analysis),
        first_step=first_step,
        findings=analysis.findings,
        notes=tuple(_write_notes(analysis)),
    )


def _list_device(analysis: Analysis) -> Iterator[DeviceRow]:
    if analysis.process_bytes is None:
        return
    peak, most = analysis.peak_bytes, analysis.library_peak_bytes
    reserved = analysis.reserved_bytes
    yield DeviceRow("allocated", peak, peak, "torch.cuda.max_memory_allocated()")
    if most > peak:
        note = "the same; cuDNN chooses at run time"
        yield DeviceRow("with cuDNN's workspaces", peak, most, note)
    yield DeviceRow("reserved", reserved, reserved, "torch.cuda.max_memory_reserved()")
    yield DeviceRow("process", *analysis.process_bytes, "nvidia-smi")


def _list_live(analysis: Analysis) -> Iterator[LiveRow]:
    peak, nodes = analysis.peak, analysis.nodes
    for each in peak.live:
        if each.nbytes:
            label, saved_by = analysis.labels[each.index], (nodes[at].name for at in each.saved_by)
            tensor = (each.nbytes, each.category, label, each.shape, each.dtype)
            source = None if each.node is None else nodes[each.node].source
            yield LiveRow(*tensor, source, tuple(saved_by))
    if peak.workspace_bytes:
        label, category = label_operator(peak.operation), Category.WORKSPACE
        yield LiveRow(peak.workspace_bytes, category, label, None, "", peak.source)


def _list_nodes(analysis: Analysis) -> Iterator[NodeRow]:
    placeholders = {node.name: node.index for node in analysis.nodes if node.op == "placeholder"}
    inputs = {
        storage.index: placeholders[storage.name]
        for storage in analysis.graph.storages
        if storage.category is Category.INPUT and storage.name in placeholders
    }
    live, peak = Counter[int](), analysis.peak
    for storage in peak.live:
        node = inputs.get(storage.index, storage.node)
        if node is not None:
            live[node] += storage.nbytes
    if peak.node is not None:
        live[peak.node.index] += peak.workspace_bytes
    for each in analysis.nodes:
        values = {field.name: getattr(each, field.name) for field in fields(Node)}
        # A placeholder's result is the storage that the caller handed in.
        handed_in = tuple(i for i, at in inputs.items() if at == each.index)
        values["results"] = each.results or handed_in
        yield NodeRow(**values, live_bytes=live[each.index])


def _write_notes(analysis: Analysis) -> Iterator[str]:
    setup = analysis.setup
    yield from setup.notes
    if setup.frontend_reason:
        ways = (way for text, way in _WAYS_TO_A_GRAPH.items() if text in setup.frontend_reason)
        yield (
            f"Traced by {setup.frontend}, not fx: {setup.frontend_reason}. "
            "The memory figures do not depend on the tracer; plans cover whole modules only"
            f"{next(ways, '')}."
        )
    if setup.mode != "train" or setup.window:
        return
    if setup.loss is None:
        is_summed = any(
            operation.phase is Phase.LOSS and operation.name == "aten.sum.default"
            for operation in analysis.graph.operations
        )
        what = "the sum of the output's floating-point tensors" if is_summed else "the model's own"
        yield f"No loss given: {what} is used."
    if setup.optimizer is None:
        yield "No optimizer given: the step ends after backward."

"""The content of a report, before it takes a format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from fxmem.analysis import Analysis
from fxmem.graph import Category, Node, Phase, SourceLocation
from fxmem.memory.allocation import Exhaustion
from fxmem.memory.labels import label_operator

_ALIKE = 0.01
"""The share of it by which the peaks of the first and the second step may differ unsaid."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The peak, and its place in the step.

    Attributes:
        peak_bytes: Most bytes allocated at any moment.
        phase: The part of the step in which the peak lies.
        node: Name of the node there, or None where the operator belongs to none.
        source: The user's own line, or None.
        optimizer: Name of the optimizer, or None.
        parameters: In the optimizer, the parameters whose update is under way.
    """

    peak_bytes: int
    phase: Phase
    node: str | None
    source: SourceLocation | None
    optimizer: str | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """The setup of an analysis, as :class:`fxmem.analysis.Setup` has it.

    Attributes:
        context: The context that disables gradients in inference, where memory may depend on it.
        loop: The training loop; empty where that does not matter.
    """

    model: str
    inputs: tuple[str, ...]
    mode: str
    device: str
    gpu: str | None
    autocast: str | None
    optimizer: str | None
    loss: str | None
    context: str = ""
    loop: str = ""


@dataclass(frozen=True, slots=True)
class Total:
    """One number of the whole step, in bytes."""

    label: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A figure to compare with one that the device reports.

    Attributes:
        label: Its name.
        least_bytes: The figure, or the least of a range.
        most_bytes: The most of the range; the same where it is one figure.
        compare_with: The call or program that reports it.
    """

    label: str
    least_bytes: int
    most_bytes: int
    compare_with: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The step in the memory of the target GPU.

    Attributes:
        gpu: Its name.
        capacity_bytes: All its memory.
        exhaustion: Where its memory runs out; None where the step fits.
        retries: How often the allocator gives back its cache to make room.
    """

    gpu: str
    capacity_bytes: int
    exhaustion: Exhaustion | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """One category's bytes at the peak, and their share of it, from 0 to 1."""

    category: Category
    nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A storage that is alive at the peak, or the workspace of the kernel that runs there.

    Attributes:
        nbytes: Its size.
        category: Its category.
        label: As :func:`fxmem.memory.labels.label_storages` has it, or the operator whose
            workspace it is.
        shape: Of the first tensor on it; None for a workspace.
        dtype: Of that tensor; empty for a workspace.
        saved_by: Names of the nodes that saved it for backward.
        source: The user's line that made it, or None.
    """

    nbytes: int
    category: Category
    label: str
    shape: tuple[int, ...] | None
    dtype: str
    saved_by: tuple[str, ...]
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class NodeRow(Node):
    """A node of the traced model, and its memory at the peak.

    Attributes:
        live_bytes: Alive at the peak: its result, what its backward makes, and the workspace of
            its kernel there.
    """

    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """The content of one analysis's report.

    Attributes:
        headline: The peak.
        subject: The setup.
        device: Figures to compare with the device's own; none on the CPU.
        fit: The step in the memory of the target GPU; None without one.
        totals: Parameters, saved activations and the like, over the whole step.
        forward_flops: Floating-point operations of forward and loss.
        backward_flops: Those of backward.
        breakdown: Largest first; sums to the peak; no zero rows.
        live: The storages alive at the peak, largest first; sums to the peak.
        nodes: In order of execution.
        notes: Remarks on the figures, a sentence each.
        storage_bytes: The size of each storage, by its index (``NodeRow.results``).
        first_step: The peak of the first step, where it differs from that of the headline, of
            the second step, by more than 1 %; else None.
    """

    headline: Headline
    subject: Subject
    device: tuple[DeviceRow, ...]
    fit: Fit | None
    totals: tuple[Total, ...]
    forward_flops: int
    backward_flops: int
    breakdown: tuple[BreakdownRow, ...]
    live: tuple[LiveRow, ...]
    nodes: tuple[NodeRow, ...]
    notes: tuple[str, ...]
    storage_bytes: tuple[int, ...] = ()
    first_step: Headline | None = None


def build_document(analysis: Analysis) -> Document:
    """Collects the content of an analysis's report."""
    peak, optimizer, run = analysis.peak, analysis.setup.optimizer, analysis.device_run
    node = peak.node.name if peak.node else None
    first, first_step = analysis.first_step, None
    if first is not None and abs(first.peak_bytes - peak.nbytes) > _ALIKE * peak.nbytes:
        first_step = Headline(
            first.peak_bytes, first.phase, first.node, first.source, optimizer, parameters=()
        )
    breakdown = [
        BreakdownRow(category, nbytes, nbytes / peak.nbytes)
        for category, nbytes in analysis.breakdown.items()
        if nbytes
    ]
    totals = {
        "parameters": analysis.parameter_bytes,
        "buffers": analysis.buffer_bytes,
        "inputs": analysis.input_bytes,
        "saved for backward": analysis.saved_bytes,
        "gradients": analysis.gradient_bytes,
        "optimizer state": analysis.optimizer_state_bytes,
    }
    fit = None
    if analysis.gpu is not None and run is not None:
        fit = Fit(analysis.gpu.name, analysis.gpu.capacity_bytes, run.exhaustion, run.retries)
    return Document(
        headline=Headline(peak.nbytes, peak.phase, node, peak.source, optimizer, peak.parameters),
        subject=describe_subject(analysis),
        device=tuple(_list_device(analysis)),
        fit=fit,
        totals=tuple(Total(label, nbytes) for label, nbytes in totals.items() if nbytes),
        forward_flops=analysis.forward_flops,
        backward_flops=analysis.backward_flops,
        breakdown=tuple(sorted(breakdown, key=lambda row: -row.nbytes)),
        # The sort is stable: storages of one size stay in their order of allocation.
        live=tuple(sorted(_list_live(analysis), key=lambda row: -row.nbytes)),
        nodes=tuple(_list_nodes(analysis)),
        notes=tuple(_write_notes(analysis)),
        storage_bytes=tuple(storage.nbytes for storage in analysis.allocated_graph.storages),
        first_step=first_step,
    )


def describe_subject(analysis: Analysis) -> Subject:
    """Describes the setup of an analysis."""
    setup = analysis.setup
    context = "no_grad()" if setup.mode == "infer" and setup.autocast else ""
    return Subject(
        model=setup.model,
        inputs=setup.inputs,
        mode=setup.mode,
        device=setup.device,
        gpu=setup.gpu,
        autocast=setup.autocast,
        optimizer=setup.optimizer,
        loss=setup.loss,
        context="inference_mode()" if setup.inference_mode else context,
        loop=setup.loop.describe() if setup.mode == "train" else "",
    )


def _list_device(analysis: Analysis) -> Iterator[DeviceRow]:
    if analysis.process_bytes is None:
        return
    peak, most = analysis.peak_bytes, analysis.library_peak_bytes
    yield DeviceRow("allocated", peak, peak, "torch.cuda.max_memory_allocated()")
    if most > peak:
        note = "the same; cuDNN chooses at run time"
        yield DeviceRow("with cuDNN's workspaces", peak, most, note)
    reserved = analysis.reserved_bytes
    yield DeviceRow("reserved", reserved, reserved, "torch.cuda.max_memory_reserved()")
    yield DeviceRow("process", *analysis.process_bytes, "nvidia-smi")


def _list_live(analysis: Analysis) -> Iterator[LiveRow]:
    peak, nodes = analysis.peak, analysis.nodes
    for storage in peak.live:
        if storage.nbytes:
            yield LiveRow(
                nbytes=storage.nbytes,
                category=storage.category,
                label=analysis.labels[storage.index],
                shape=storage.shape,
                dtype=storage.dtype,
                saved_by=tuple(nodes[index].name for index in storage.saved_by),
                source=None if storage.node is None else nodes[storage.node].source,
            )
    if peak.workspace_bytes:
        label = label_operator(peak.operation)
        category = Category.WORKSPACE
        yield LiveRow(peak.workspace_bytes, category, label, None, "", (), peak.source)


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
        row = NodeRow(
            **{field.name: getattr(each, field.name) for field in fields(Node)},
            live_bytes=live[each.index],
        )
        # A placeholder's result is the storage that the caller handed in.
        handed_in = tuple(i for i, at in inputs.items() if at == each.index)
        yield row if each.results else replace(row, results=handed_in)


def _write_notes(analysis: Analysis) -> Iterator[str]:
    setup = analysis.setup
    yield from setup.notes
    if setup.frontend_reason:
        yield (
            f"Traced by {setup.frontend}, not fx: {setup.frontend_reason}. "
            "The memory figures do not depend on the tracer; plans cover whole modules only."
        )
    if setup.mode != "train":
        return
    if setup.loss is None:
        is_summed = any(node.phase is Phase.LOSS for node in analysis.nodes)
        what = "the sum of the output's floating-point tensors" if is_summed else "the model's own"
        yield f"No loss given: {what} is used."
    if setup.optimizer is None:
        yield "No optimizer given: the step ends after backward."

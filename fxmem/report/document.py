"""What a report says, before it is known how: every format is rendered from a Document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxmem.analysis import Analysis
from fxmem.graph import Category, Phase, SourceLocation, Storage
from fxmem.labels import label_operator


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer: how much, and where.

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
    """What was analysed, and how.

    Attributes:
        model: The TARGET, or the class of the module.
        inputs: One spec for each input.
        mode: ``train`` or ``infer``.
        device: Target device.
        gpu: The GPU that is meant, or None.
        autocast: What forward and loss are autocast to, or None.
        optimizer: Name of the optimizer, or None.
        loss: Name of the loss, or None for the default.
    """

    model: str
    inputs: tuple[str, ...]
    mode: str
    device: str
    gpu: str | None
    autocast: str | None
    optimizer: str | None
    loss: str | None


@dataclass(frozen=True, slots=True)
class Total:
    """One number of the whole step, in bytes."""

    label: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A number that a user compares with one of the device's.

    Attributes:
        label: What it is.
        least_bytes: The number, or the least of a range.
        most_bytes: The most of it; the same where it is one number.
        compare_with: What says it on the device.
    """

    label: str
    least_bytes: int
    most_bytes: int
    compare_with: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the step fits the GPU that is meant.

    Attributes:
        gpu: Its name.
        capacity_bytes: All its memory.
        cause: What ran out, in the allocator's words; empty where it fits.
        phase: Where it did; None where it fits, and before the step that was analysed.
        node: Name of the node there, or None.
        source: The user's own line, or None.
    """

    gpu: str
    capacity_bytes: int
    cause: str = ""
    phase: Phase | None = None
    node: str | None = None
    source: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """What one category takes at the peak.

    Attributes:
        category: The category.
        nbytes: Its bytes there.
        share: Its part of the peak, from 0 to 1.
    """

    category: Category
    nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A storage that is alive at the peak, or the workspace of the kernel that runs there.

    Attributes:
        nbytes: Its size.
        category: What it is for.
        label: The name of the parameter, the input, or the node that made it; what a temporary
            of backward or of the optimizer is; or the operator whose workspace it is.
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
class NodeRow:
    """One node of the traced model.

    The attributes are those of ``fxmem.graph.Node``, and ``live_bytes``: what of it is alive at
    the peak, be it its result, what its backward makes, or the workspace of its kernel there.
    """

    name: str
    target: str
    shape: tuple[int, ...] | None
    dtype: str | None
    output_bytes: int
    saved_bytes: int
    transient_bytes: int
    forward_flops: int
    backward_flops: int
    source: SourceLocation | None
    fqn: str = ""
    op: str = "call_module"
    phase: Phase = Phase.FORWARD
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that a report of one analysis says.

    Attributes:
        headline: The answer.
        subject: What was analysed.
        device: Numbers to compare with the device's; none on the CPU.
        fit: Whether the step fits; None where no GPU is meant.
        totals: Parameters, saved activations and the like, over the whole step.
        forward_flops: Floating-point operations of forward and loss.
        backward_flops: Those of backward.
        breakdown: Largest first; sums to the peak; no zero rows.
        live: What is alive at the peak, largest first; sums to the peak.
        nodes: In order of execution.
        notes: What the reader should know about the numbers, a sentence each.
        storage_bytes: The size of each storage, by its index: what ``NodeRow.results`` are.
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


def build_document(analysis: Analysis) -> Document:
    """What there is to say about an analysis.

    Args:
        analysis: The result of :func:`fxmem.analyze`.
    """
    peak = analysis.peak
    return Document(
        headline=Headline(
            peak_bytes=peak.nbytes,
            phase=peak.phase,
            node=peak.node.name if peak.node else None,
            source=peak.source,
            optimizer=analysis.setup.optimizer,
            parameters=peak.parameters,
        ),
        subject=describe_subject(analysis),
        device=tuple(_list_device(analysis)),
        fit=_describe_fit(analysis),
        totals=_list_totals(analysis),
        forward_flops=analysis.forward_flops,
        backward_flops=analysis.backward_flops,
        breakdown=_list_breakdown(analysis),
        live=_list_live(analysis),
        nodes=_list_nodes(analysis),
        notes=tuple(_write_notes(analysis)),
        storage_bytes=tuple(storage.nbytes for storage in analysis.allocated_graph.storages),
    )


def describe_subject(analysis: Analysis) -> Subject:
    """What was analysed.

    Args:
        analysis: The result of :func:`fxmem.analyze`.
    """
    setup = analysis.setup
    return Subject(
        model=setup.model,
        inputs=setup.inputs,
        mode=setup.mode,
        device=setup.device,
        gpu=setup.gpu,
        autocast=setup.autocast,
        optimizer=setup.optimizer,
        loss=setup.loss,
    )


def _list_device(analysis: Analysis) -> Iterable[DeviceRow]:
    if analysis.process_bytes is None:
        return
    peak, reserved = analysis.peak_bytes, analysis.reserved_bytes
    yield DeviceRow("allocated", peak, peak, "torch.cuda.max_memory_allocated()")
    if analysis.library_peak_bytes > peak:
        most = analysis.library_peak_bytes
        yield DeviceRow("with cuDNN's workspaces", peak, most, "the same: cuDNN chooses them")
    yield DeviceRow("reserved", reserved, reserved, "torch.cuda.max_memory_reserved()")
    yield DeviceRow("process", *analysis.process_bytes, "nvidia-smi")


def _describe_fit(analysis: Analysis) -> Fit | None:
    gpu, exhaustion = analysis.gpu, analysis.exhaustion
    if gpu is None:
        return None
    if exhaustion is None:
        return Fit(gpu.name, gpu.capacity_bytes)
    if exhaustion.step is None:
        return Fit(gpu.name, gpu.capacity_bytes, exhaustion.cause)
    operation = analysis.graph.operations[exhaustion.step]
    node = None if operation.node is None else analysis.nodes[operation.node]
    return Fit(
        gpu.name,
        gpu.capacity_bytes,
        exhaustion.cause,
        operation.phase,
        node.name if node else None,
        node.source if node else None,
    )


def _list_totals(analysis: Analysis) -> tuple[Total, ...]:
    totals = (
        Total("parameters", analysis.parameter_bytes),
        Total("buffers", analysis.buffer_bytes),
        Total("inputs", analysis.input_bytes),
        Total("saved for backward", analysis.saved_bytes),
        Total("gradients", analysis.gradient_bytes),
        Total("optimizer state", analysis.optimizer_state_bytes),
    )
    return tuple(total for total in totals if total.nbytes)


def _list_breakdown(analysis: Analysis) -> tuple[BreakdownRow, ...]:
    rows = [
        BreakdownRow(category, nbytes, nbytes / analysis.peak_bytes)
        for category, nbytes in analysis.breakdown.items()
        if nbytes
    ]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _list_live(analysis: Analysis) -> tuple[LiveRow, ...]:
    rows = [_describe_storage(analysis, s) for s in analysis.peak.live if s.nbytes]
    if analysis.peak.workspace_bytes:
        rows.append(_describe_workspace(analysis))
    # The sort is stable: storages of one size stay in their order of allocation.
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _describe_storage(analysis: Analysis, storage: Storage) -> LiveRow:
    return LiveRow(
        nbytes=storage.nbytes,
        category=storage.category,
        label=analysis.labels[storage.index],
        shape=storage.shape,
        dtype=storage.dtype,
        saved_by=tuple(analysis.nodes[index].name for index in storage.saved_by),
        source=None if storage.node is None else analysis.nodes[storage.node].source,
    )


def _describe_workspace(analysis: Analysis) -> LiveRow:
    peak = analysis.peak
    return LiveRow(
        nbytes=peak.workspace_bytes,
        category=Category.WORKSPACE,
        label=label_operator(peak.operation),
        shape=None,
        dtype="",
        saved_by=(),
        source=peak.source,
    )


def _list_nodes(analysis: Analysis) -> tuple[NodeRow, ...]:
    inputs = _find_inputs(analysis)
    live = _measure_live(analysis, inputs)
    return tuple(
        NodeRow(
            name=node.name,
            target=node.target,
            shape=node.shape,
            dtype=node.dtype,
            output_bytes=node.output_bytes,
            saved_bytes=node.saved_bytes,
            transient_bytes=node.transient_bytes,
            forward_flops=node.forward_flops,
            backward_flops=node.backward_flops,
            source=node.source,
            fqn=node.fqn,
            op=node.op,
            phase=node.phase,
            inputs=node.inputs,
            results=node.results or tuple(i for i, at in inputs.items() if at == node.index),
            live_bytes=live[node.index],
        )
        for node in analysis.nodes
    )


def _measure_live(analysis: Analysis, inputs: Mapping[int, int]) -> Mapping[int, int]:
    """Bytes alive at the peak, by the index of the node that they belong to."""
    peak = analysis.peak
    live = dict.fromkeys(range(len(analysis.nodes)), 0)
    for storage in peak.live:
        node = inputs.get(storage.index, storage.node)
        if node is not None:
            live[node] += storage.nbytes
    if peak.node is not None:
        live[peak.node.index] += peak.workspace_bytes
    return live


def _find_inputs(analysis: Analysis) -> Mapping[int, int]:
    """The placeholder of each storage that the caller handed in, by its index."""
    placeholders = {node.name: node.index for node in analysis.nodes if node.op == "placeholder"}
    return {
        storage.index: placeholders[storage.name]
        for storage in analysis.graph.storages
        if storage.category is Category.INPUT and storage.name in placeholders
    }


def _write_notes(analysis: Analysis) -> Iterable[str]:
    setup = analysis.setup
    yield from setup.notes
    if setup.frontend_reason:
        yield (
            f"Traced by {setup.frontend}, not fx: {setup.frontend_reason}. "
            "The numbers do not depend on that."
        )
    if setup.mode != "train":
        return
    if setup.loss is None:
        is_summed = any(node.phase is Phase.LOSS for node in analysis.nodes)
        what = "the sum of the output's floating tensors" if is_summed else "the model's own"
        yield f"No loss was given: it is {what}."
    if setup.optimizer is None:
        yield "No optimizer was given: the step ends with backward."

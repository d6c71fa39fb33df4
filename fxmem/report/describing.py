"""From an analysis to what a report says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxmem.analysis import Analysis, Setup
from fxmem.graph import Category, Phase, Storage
from fxmem.memory.labels import label_operator
from fxmem.report.document import (
    BreakdownRow,
    DeviceRow,
    Document,
    Fit,
    Headline,
    LiveRow,
    NodeRow,
    Subject,
    Total,
)

_ALIKE = 0.01
"""By which share of it the peaks of the first and the second step may differ unsaid."""


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
        first_step=_describe_first_step(analysis),
    )


def _describe_first_step(analysis: Analysis) -> Headline | None:
    first, peak_bytes = analysis.first_step, analysis.peak_bytes
    if first is None or abs(first.peak_bytes - peak_bytes) <= _ALIKE * peak_bytes:
        return None
    return Headline(
        peak_bytes=first.peak_bytes,
        phase=first.phase,
        node=first.node,
        source=first.source,
        optimizer=analysis.setup.optimizer,
        parameters=(),
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
        context=_name_context(setup),
        loop=setup.loop.describe() if setup.mode == "train" else "",
    )


def _name_context(setup: Setup) -> str:
    if setup.inference_mode:
        return "inference_mode()"
    return "no_grad()" if setup.mode == "infer" and setup.autocast else ""


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
    gpu, run = analysis.gpu, analysis.device_run
    if gpu is None or run is None:
        return None
    return Fit(gpu.name, gpu.capacity_bytes, run.exhaustion, run.retries)


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

"""The analysis of a model: loaded, recorded and described."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxmem.analysis import Analysis, Setup
from fxmem.errors import DataDependentError, TraceError, UsageError
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import describe_inputs, make_fake_mode
from fxmem.fakes.swapping import restore_user_state
from fxmem.graph import Category, MemoryGraph
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.loading.building import silence_fake_kernels
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings
from fxmem.parallelism.layout import Layout
from fxmem.parallelism.process_group import offer_group
from fxmem.patching import hold_process, leave_recording
from fxmem.tracing.compiled import NOT_COMPILED
from fxmem.tracing.conditions import leave_autocast
from fxmem.tracing.modules import describe_model, remember_model
from fxmem.tracing.state import save_random_states
from fxmem.training.blueprint import Blueprint
from fxmem.training.failures import is_traced
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer
from fxmem.training.options import (
    LossChoice,
    OptimizerChoice,
    Options,
    check_choices,
    load_choice,
    name_choice,
    resolve_options,
)
from fxmem.training.step import Recording
from fxmem.units import format_bytes
from fxmem.versions.release import check_release


def analyze_model(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    alloc_conf: str | None = None,
    **options: Any,
) -> Analysis:
    """Records a step of a model and describes it: :func:`fxmem.analyze`, with its arguments.

    The other options are of :func:`fxmem.training.options.resolve_options`.
    """
    check_release()
    chosen = resolve_options(**options)
    if chosen.layout is not None and chosen.layout.rank == "worst":
        asked = {**options, "optimizer": optimizer, "loss": loss, "alloc_conf": alloc_conf}
        return _find_worst(model, args, kwargs, asked, chosen.layout)
    settings = find_settings(chosen.target.name, alloc_conf)
    check_choices(loss, optimizer)
    inputs = gather_inputs(args, kwargs)
    other = None
    layout = chosen.layout
    choices = (model, loss, optimizer, layout and layout.parallelize)
    with isolate_analysis(*choices, options=chosen, layout=layout):
        blueprint = _draw_blueprint(model, *inputs, loss, optimizer, chosen)
        described = describe_model(blueprint.model)
        given = blueprint.make_inputs()
        check_inputs(blueprint.model, *given)
        specs = describe_inputs(*given)
        served = _record(blueprint, specs)
        if chosen.mode == "infer" and served.recording.casts_weights:
            # Memory differs between no_grad and inference_mode, where autocast keeps no casts.
            reverse, frontend = not chosen.inference_mode, served.frontend
            other_options = replace(chosen, inference_mode=reverse, frontend=frontend)
            other = _record(replace(blueprint, options=other_options), specs).recording.graph
    graph = served.recording.fx_graph
    remember_model(graph, described)
    setup = describe_setup(
        model if isinstance(model, str) else type(model).__name__,
        specs,
        chosen,
        optimizer,
        loss,
        frontend=served.frontend,
        frontend_reason=served.reason,
        notes=tuple(_list_notes(blueprint, served.recording, loss=loss, optimizer=optimizer)),
        compiled=NOT_COMPILED in served.recording.notes,
        **_describe_layout(chosen.layout),
    )
    blueprint = replace(blueprint, args=given[0], kwargs=given[1])  # fakes, which take no memory
    analysis = Analysis(setup, served.recording.graph, settings, chosen.gpu, graph, blueprint)
    return analysis if other is None else _note_other_mode(analysis, other)


def describe_setup(
    model: str,
    inputs: tuple[str, ...],
    options: Options,
    optimizer: OptimizerChoice,
    loss: LossChoice,
    **others: Any,
) -> Setup:
    """Describes how a step was set up, with other fields besides those of the options."""
    return Setup(
        model=model,
        inputs=inputs,
        mode=options.mode,
        inference_mode=options.inference_mode,
        device=options.target.name,
        autocast=options.autocast,
        gpu=options.gpu.name if options.gpu else None,
        attention=options.architecture.attention,
        optimizer=name_choice(optimizer),
        loss=name_choice(loss),
        size_hint=options.size_hint,
        loop=options.loop,
        **others,
    )


def _note_other_mode(analysis: Analysis, other: MemoryGraph) -> Analysis:
    """Notes the peak under the other mode without gradients, if it differs."""
    peak_bytes = replace(analysis, graph=other).peak_bytes
    if peak_bytes == analysis.peak_bytes:
        return analysis
    setup = analysis.setup
    under, keeps = "torch.inference_mode() (inference_mode=True, --inference-mode)", "no"
    if setup.inference_mode:
        under, keeps = "torch.no_grad()", "its"
    note = (
        f"Under {under} the peak is {format_bytes(peak_bytes)}: autocast keeps {keeps} casts of "
        "weights there."
    )
    return replace(analysis, setup=replace(setup, notes=(*setup.notes, note)))


def _find_worst(
    model: nn.Module | str, args: Any, kwargs: Any, options: dict[str, Any], layout: Layout
) -> Analysis:
    """Analyses the ranks that may differ, and returns the one with the highest peak."""
    analyses = [
        analyze_model(model, args, kwargs, **{**options, "rank": rank})
        for rank in layout.list_differing()
    ]
    worst = max(analyses, key=lambda analysis: analysis.peak_bytes)
    least = min(analyses, key=lambda analysis: analysis.peak_bytes)
    note = f"All {layout.world_size} ranks have the same peak."
    if least.peak_bytes < worst.peak_bytes:
        rank, peak = least.setup.rank, format_bytes(least.peak_bytes)
        note = f"Of the ranks compared, {rank} has the lowest peak: {peak}."
    return replace(worst, setup=replace(worst.setup, notes=(*worst.setup.notes, note)))


def _describe_layout(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    parallelize = name_choice(layout.parallelize)
    return {"mesh": dict(layout.mesh), "parallelize": parallelize, "rank": layout.rank}


def analyze_again(analysis: Analysis) -> Analysis:
    """Records an analysed step again, with its model as it has been changed since."""
    blueprint, options = analysis.blueprint, analysis.blueprint.options
    layout = options.layout
    with isolate_analysis(layout and layout.parallelize, options=options, layout=layout):
        recording = _record(blueprint, analysis.setup.inputs).recording
    return replace(analysis, graph=recording.graph, fx_graph=recording.fx_graph)


def trace_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any
) -> tuple[fx.Graph, str]:
    """Traces the forward of a model once, without recording the step.

    Returns:
        The FX graph, and what it cannot express.
    """
    chosen = resolve_options(**options)
    inputs = gather_inputs(args, kwargs)
    with isolate_analysis(model, options=chosen):
        blueprint = _draw_blueprint(model, *inputs, None, None, chosen)
        kinds = {type(module) for module in model.modules()}
        with contextlib.ExitStack() as after, restore_user_state(kinds), blueprint.fake_mode:
            after.callback(save_random_states())
            return blueprint.trace()


@contextlib.contextmanager
def isolate_analysis(
    *choices: object, options: Options | None = None, layout: Layout | None = None
) -> Iterator[None]:
    """Runs an analysis of arguments that may be a TARGET as in a process of its own.

    Within, there is a GPU where the options' target is one; without options there is none.
    """
    gpu, count = None, 1 if layout is None else layout.world_size
    if options is not None and options.target.name == "cuda":
        gpu = options.architecture
    with (
        hold_process(),
        leave_recording(),
        torch.inference_mode(False),
        torch.enable_grad(),
        leave_autocast(),
        prepare_targets(*choices),
        silence_fake_kernels(),
        offer_group(layout, "gloo" if gpu is None else "nccl"),
        contextlib.nullcontext() if gpu is None else show_gpu(gpu, count=lambda: count),
    ):
        yield


def _draw_blueprint(
    model: nn.Module | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossChoice,
    optimizer: OptimizerChoice,
    options: Options,
) -> Blueprint:
    fake_mode, named_devices = make_fake_mode(), set[str]()
    with translate_devices(named=named_devices):
        source = load_target(model, fake_mode) if isinstance(model, str) else model
        make_optimizer = resolve_optimizer(load_choice(optimizer))
        step_loss = resolve_loss(load_choice(loss))
    check_model(source)
    return Blueprint(
        source, args, kwargs, step_loss, make_optimizer, options, fake_mode, named_devices
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A recording, and the frontend that made it."""

    recording: Recording
    frontend: str  # "fx" or "record"
    reason: str  # why fx did not serve, or ""


def _record(blueprint: Blueprint, inputs: Sequence[str]) -> Served:
    """Records the step, and restores what the user's code keeps from call to call."""
    kinds = {type(module) for module in blueprint.model.modules()}
    users = [*kinds, blueprint.loss, blueprint.make_optimizer]
    with contextlib.ExitStack() as after, restore_user_state(users), blueprint.fake_mode:
        after.callback(save_random_states())

        def record(symbolic_sizes: bool) -> Recording:
            recording = blueprint.record(symbolic_sizes, inputs)
            depends = recording.is_routed or blueprint.options.size_hint is not None
            if not symbolic_sizes or recording.reason or not depends:
                return recording
            is_hinted = blueprint.is_hinted(recording.fx_graph)
            reason = "its code goes by a size that depends on data" if is_hinted else ""
            return replace(recording, reason=reason)

        options = blueprint.options
        if options.layout is not None:
            return Served(record(False), "record", "")
        return record_with_frontend(record, options.frontend)


def record_with_frontend(record: Callable[[bool], Recording], frontend: str | None) -> Served:
    """Records with the frontend asked for, else with the first that serves.

    Sizes stay nodes for ``fx``, and are numbers for ``record``.

    Raises:
        TraceError: The step fails, or ``fx`` was asked for and cannot express the model.
    """
    if frontend == "record":
        return Served(record(False), "record", "record was asked for")
    try:
        recording = record(True)
    except DataDependentError:
        raise
    except TraceError as error:
        # An error that did not pass through the tracer would come again without it.
        if frontend == "fx" or not is_traced(error.__cause__ or error):
            raise
        reason = error.cause
    else:
        if not recording.reason:
            return Served(recording, "fx", "")
        if frontend == "fx":
            raise TraceError(
                f"the fx frontend cannot express this model: {recording.reason}",
                hint="leave the frontend out, and record will serve",
            )
        return Served(recording, "record", recording.reason)
    return Served(record(False), "record", reason)


def _list_notes(blueprint: Blueprint, recording: Recording, **choices: object) -> Iterator[str]:
    """Lists what the reader of an analysis should know, a sentence each."""
    target, graph = blueprint.options.target, recording.graph
    others = sorted(name for name in blueprint.named_devices if not name.startswith(target.name))
    if others:
        yield f"The code names devices ({', '.join(others)}): taken as the target, {target.name}."
    unused = [name for name, choice in choices.items() if choice is not None]
    if unused and blueprint.options.mode == "infer":
        yield f"Inference leaves out the {' and the '.join(unused)}."
    held = [s for s in graph.storages if s.category is Category.OUTPUT and s.born < 0]
    if held:
        nbytes = format_bytes(sum(storage.nbytes for storage in held))
        yield f"Results of the step before take {nbytes} until those of this one are there."
    if sizes := blueprint.options.hints.describe():
        yield f"Sizes that depend on data are taken as {sizes} (size_hint)."
    yield from recording.notes
    yield from blueprint.options.list_notes(operation.name for operation in graph.operations)


def find_settings(device: str, alloc_conf: str | None) -> AllocatorSettings | None:
    if device != "cuda":
        if alloc_conf is not None:
            raise UsageError("the allocator's settings are for CUDA", hint="device='cuda'")
        return None
    if alloc_conf is None:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        alloc_conf = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return parse_settings(alloc_conf)

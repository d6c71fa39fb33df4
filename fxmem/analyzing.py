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
from fxmem.graph import Category, MemoryGraph
from fxmem.kernels.autocast.dispatch import allow_autocast
from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.registry import Target
from fxmem.loading.building import silence_fake_kernels
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.memory.allocator import AllocatorSettings, parse_settings
from fxmem.recording.blueprint import Blueprint
from fxmem.recording.failures import is_traced
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.options import (
    LossChoice,
    OptimizerChoice,
    Options,
    check_choices,
    load_choice,
    name_choice,
    resolve_options,
)
from fxmem.recording.step import Recording
from fxmem.tracing.conditions import leave_autocast
from fxmem.tracing.devices import replace_devices
from fxmem.tracing.fakes import describe_inputs, make_fake_mode
from fxmem.tracing.modules import describe_model, remember_model
from fxmem.tracing.state import save_random_states
from fxmem.tracing.swapping import restore_user_state
from fxmem.units import format_bytes


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
    """Records a step of a model and describes it: what :func:`fxmem.analyze` returns.

    Args:
        model: As for :func:`fxmem.analyze`, like the arguments below.
        args: Positional inputs.
        kwargs: Keyword inputs.
        optimizer: The optimizer.
        loss: The loss.
        alloc_conf: Settings of the caching allocator.
        options: Arguments of :func:`fxmem.recording.options.resolve_options`.
    """
    chosen = resolve_options(**options)
    settings = _find_settings(chosen.target.name, alloc_conf)
    check_choices(loss, optimizer)
    inputs = gather_inputs(args, kwargs)
    with isolate_analysis(model, loss, optimizer, target=chosen.target):
        blueprint = _draw_blueprint(model, *inputs, loss, optimizer, chosen)
        described = describe_model(blueprint.model)
        given = blueprint.make_inputs()
        check_inputs(blueprint.model, *given)
        specs = describe_inputs(*given)
        served = _record(blueprint, specs)
        other = _record_other_inference(blueprint, specs, served)
    recording = served.recording
    remember_model(recording.fx_graph, described)
    setup = _describe_setup(model, loss, optimizer, specs, blueprint, served)
    blueprint = replace(blueprint, args=given[0], kwargs=given[1])  # fakes, which take no memory
    graph = recording.fx_graph
    analysis = Analysis(setup, recording.graph, settings, chosen.gpu, graph, blueprint)
    return analysis if other is None else _compare_inference(analysis, other)


def trace_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any
) -> tuple[fx.Graph, str]:
    """Traces the forward of a model once, without recording what it takes.

    Args:
        model: As for :func:`fxmem.analyze`, like the arguments below.
        args: Positional inputs.
        kwargs: Keyword inputs.
        options: Arguments of :func:`fxmem.recording.options.resolve_options`.

    Returns:
        The FX graph, and what it cannot express.
    """
    chosen = resolve_options(**options)
    inputs = gather_inputs(args, kwargs)
    with isolate_analysis(model, target=chosen.target):
        blueprint = _draw_blueprint(model, *inputs, None, None, chosen)
        kinds = {type(module) for module in model.modules()}
        with contextlib.ExitStack() as after, restore_user_state(kinds), blueprint.fake_mode:
            after.callback(save_random_states())
            return blueprint.trace()


@contextlib.contextmanager
def isolate_analysis(*choices: object, target: Target = CPU) -> Iterator[None]:
    """Runs an analysis as in a process of its own, whatever modes the caller is in.

    Args:
        choices: Arguments that may be a TARGET.
        target: The device whose kernels run the step.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        leave_autocast(),
        prepare_targets(*choices),
        silence_fake_kernels(),
        allow_autocast() if target is CUDA else contextlib.nullcontext(),
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
    """Loads what is given as a TARGET."""
    fake_mode, named_devices = make_fake_mode(), set[str]()
    with replace_devices(named_devices):
        source = load_target(model, fake_mode) if isinstance(model, str) else model
        make_optimizer = resolve_optimizer(load_choice(optimizer))
        step_loss = resolve_loss(load_choice(loss))
    check_model(source)
    return Blueprint(
        source, args, kwargs, step_loss, make_optimizer, options, fake_mode, named_devices
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A recording, and the frontend that made it.

    Attributes:
        recording: The step.
        frontend: ``fx`` or ``record``.
        reason: Why ``fx`` did not serve; empty where it did.
    """

    recording: Recording
    frontend: str
    reason: str


def _record(blueprint: Blueprint, inputs: Sequence[str]) -> Served:
    """Records the step, and restores what the user's code keeps from call to call."""
    kinds = {type(module) for module in blueprint.model.modules()}
    users = [*kinds, blueprint.loss, blueprint.make_optimizer]
    with contextlib.ExitStack() as after, restore_user_state(users), blueprint.fake_mode:
        after.callback(save_random_states())
        return record_with_frontend(
            lambda symbolic_sizes: blueprint.record(symbolic_sizes, inputs),
            blueprint.options.frontend,
        )


def record_with_frontend(record: Callable[[bool], Recording], frontend: str | None) -> Served:
    """Records with the frontend asked for, else with the first that serves.

    Args:
        record: Records a step, with sizes that stay nodes (``fx``) or as numbers (``record``).
        frontend: The frontend asked for, or None.

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


def _record_other_inference(
    blueprint: Blueprint, inputs: Sequence[str], served: Served
) -> MemoryGraph | None:
    """Records inference under ``inference_mode`` if it was under ``no_grad``, or the reverse.

    Returns:
        None where memory is the same: autocast casts no weights.
    """
    options = blueprint.options
    if options.mode != "infer" or not served.recording.casts_weights:
        return None
    options = replace(options, inference_mode=not options.inference_mode, frontend=served.frontend)
    return _record(replace(blueprint, options=options), inputs).recording.graph


def _compare_inference(analysis: Analysis, other: MemoryGraph) -> Analysis:
    """Notes the peak of the other kind of inference where that differs."""
    peak_bytes, setup = replace(analysis, graph=other).peak_bytes, analysis.setup
    if peak_bytes == analysis.peak_bytes:
        return analysis
    if setup.inference_mode:
        under, keeps = "torch.no_grad()", "its"
    else:
        under, keeps = "torch.inference_mode() (inference_mode=True, --inference-mode)", "no"
    note = (
        f"Under {under} the peak is {format_bytes(peak_bytes)}: autocast keeps {keeps} casts of "
        "weights there."
    )
    return replace(analysis, setup=replace(setup, notes=(*setup.notes, note)))


def _describe_setup(
    model: nn.Module | str,
    loss: LossChoice,
    optimizer: OptimizerChoice,
    inputs: tuple[str, ...],
    blueprint: Blueprint,
    served: Served,
) -> Setup:
    """Describes what was analysed: as the caller gave it, and as it was recorded."""
    options = blueprint.options
    device = options.target.name
    return Setup(
        model=model if isinstance(model, str) else type(model).__name__,
        inputs=inputs,
        mode=options.mode,
        inference_mode=options.inference_mode,
        device=device,
        autocast=options.autocast,
        gpu=options.gpu.name if options.gpu else None,
        optimizer=name_choice(optimizer),
        loss=name_choice(loss),
        frontend=served.frontend,
        frontend_reason=served.reason,
        notes=(*_note_choices(blueprint, loss, optimizer), *_note_recording(served, options)),
        size_hint=options.size_hint,
        loop=options.loop,
    )


def _note_choices(
    blueprint: Blueprint, loss: LossChoice, optimizer: OptimizerChoice
) -> Iterator[str]:
    """Notes what the analysis takes otherwise than the code or the caller says, a sentence each."""
    device = blueprint.options.target.name
    others = sorted(name for name in blueprint.named_devices if not name.startswith(device))
    if others:
        yield f"The code names devices ({', '.join(others)}): taken as the target, {device}."
    given = {"loss": loss, "optimizer": optimizer}
    unused = [name for name, choice in given.items() if choice is not None]
    if unused and blueprint.options.mode == "infer":
        yield f"Inference leaves out the {' and the '.join(unused)}."


def _note_recording(served: Served, options: Options) -> Iterator[str]:
    """Notes what the reader of a recording should know, a sentence each."""
    graph = served.recording.graph
    held = [s for s in graph.storages if s.category is Category.OUTPUT and s.born < 0]
    if held:
        nbytes = format_bytes(sum(storage.nbytes for storage in held))
        yield f"Results of the step before take {nbytes} until those of this one are there."
    yield from served.recording.notes
    reasons = {str(operator): reason for operator, reason in options.target.unmodelled.items()}
    names = dict.fromkeys(o.name for o in graph.operations if o.name in reasons)
    for reason in dict.fromkeys(map(reasons.__getitem__, names)):
        operators = ", ".join(name for name in names if reasons[name] == reason)
        yield f"Memory inside {operators} is not counted: {reason}."


def _find_settings(device: str, alloc_conf: str | None) -> AllocatorSettings | None:
    if device != "cuda":
        if alloc_conf is not None:
            raise UsageError("the allocator's settings are for CUDA", hint="device='cuda'")
        return None
    if alloc_conf is None:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        alloc_conf = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return parse_settings(alloc_conf)

"""The analysis of a model: loaded, recorded and described."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxmem.analysis import Analysis, Setup
from fxmem.errors import UsageError
from fxmem.graph import MemoryGraph
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.autocast import allow_autocast
from fxmem.kernels.target import Target
from fxmem.loading.building import silence_fake_kernels
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.memory.allocator import AllocatorSettings, parse_settings
from fxmem.recording.blueprint import Blueprint
from fxmem.recording.choices import (
    LossChoice,
    OptimizerChoice,
    check_choices,
    load_choice,
    name_choice,
)
from fxmem.recording.frontends import Served, record_with_frontend
from fxmem.recording.losses import resolve_loss
from fxmem.recording.notes import (
    note_devices,
    note_other_inference,
    note_recording,
    note_unused,
)
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.options import Options, resolve_options
from fxmem.tracing.description import describe_model, remember_model
from fxmem.tracing.devices import replace_devices
from fxmem.tracing.fakes import describe_inputs, make_fake_mode
from fxmem.tracing.generators import save_random_states
from fxmem.tracing.user_state import restore_user_state


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
    with _prepare(chosen.target, model, loss, optimizer):
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
    analysis = Analysis(setup, recording.graph, settings, chosen.gpu, recording.fx_graph)
    return analysis if other is None else _compare_inference(analysis, other)


@contextlib.contextmanager
def _prepare(target: Target, *choices: object) -> Iterator[None]:
    """Runs what is within as in a process of its own, whatever the caller is in.

    Args:
        target: The device whose kernels run the step.
        choices: What may be a TARGET.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
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


def _record(blueprint: Blueprint, inputs: Sequence[str]) -> Served:
    """Records the step, and leaves what the user's code keeps as it was."""
    kinds = {type(module) for module in blueprint.model.modules()}
    users = [*kinds, blueprint.loss, blueprint.make_optimizer]
    with contextlib.ExitStack() as after, restore_user_state(users), blueprint.fake_mode:
        after.callback(save_random_states())
        return record_with_frontend(
            lambda symbolic_sizes: blueprint.record(symbolic_sizes, inputs),
            blueprint.options.frontend,
        )


def _record_other_inference(
    blueprint: Blueprint, inputs: Sequence[str], served: Served
) -> MemoryGraph | None:
    """The same inference under ``inference_mode`` if it was under ``no_grad``, or the reverse.

    Returns:
        None where memory is the same: autocast casts no weights.
    """
    options = blueprint.options
    if options.mode != "infer" or not served.recording.casts_weights:
        return None
    options = replace(options, inference_mode=not options.inference_mode, frontend=served.frontend)
    return _record(replace(blueprint, options=options), inputs).recording.graph


def _compare_inference(analysis: Analysis, other: MemoryGraph) -> Analysis:
    """Notes the peak of the other inference where that is another."""
    peak_bytes, setup = replace(analysis, graph=other).peak_bytes, analysis.setup
    if peak_bytes == analysis.peak_bytes:
        return analysis
    note = note_other_inference(setup.inference_mode, peak_bytes)
    return replace(analysis, setup=replace(setup, notes=(*setup.notes, note)))


def _describe_setup(
    model: nn.Module | str,
    loss: LossChoice,
    optimizer: OptimizerChoice,
    inputs: tuple[str, ...],
    blueprint: Blueprint,
    served: Served,
) -> Setup:
    """What was analysed: as the caller gave it, and as it was recorded."""
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
        notes=(
            *note_devices(blueprint.named_devices, device),
            *note_unused(options.mode, loss, optimizer),
            *note_recording(served.recording, options.target),
        ),
        size_hint=options.size_hint,
        loop=options.loop,
    )


def _find_settings(device: str, alloc_conf: str | None) -> AllocatorSettings | None:
    if device != "cuda":
        if alloc_conf is not None:
            raise UsageError("the allocator's settings are for CUDA", hint="device='cuda'")
        return None
    if alloc_conf is None:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        alloc_conf = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return parse_settings(alloc_conf)

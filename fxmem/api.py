"""The public functions: from a model to an analysis."""

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
from fxmem.loop import Loop
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


def analyze(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    inference_mode: bool = False,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    loop: str | Loop = "plain",
    accumulate: int | None = None,
    set_to_none: bool | None = None,
    hold_outputs: bool | None = None,
    alloc_conf: str | None = None,
    frontend: str | None = None,
    size_hint: int | None = None,
) -> Analysis:
    """How much memory a step of a model takes, when it peaks and what is alive there.

    The step runs twice on fake tensors, which have no memory, and the second run is reported:
    ``zero_grad(set_to_none=True)``, forward, loss, backward, ``optimizer.step()``, as the training
    loop runs them.

    Args:
        model: A module with real, meta or fake parameters, which is left alone; or a TARGET
            such as ``"module:Model"``, which is built without allocating its parameters.
        args: Positional inputs, in a tuple: tensors, :class:`fxmem.TensorSpec` or
            ``"8x3x224x224:bf16"``. One that is alone needs no tuple.
        kwargs: Keyword inputs, likewise.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
        inference_mode: In inference: under ``torch.inference_mode()`` instead, where autocast
            keeps no casts of weights.
        device: Target device, which need not be there: ``"cuda"``, whose peak is to be compared
            with ``torch.cuda.max_memory_allocated()``, or ``"cpu"`` for training on the CPU.
        gpu: The GPU that is meant (``"h100"``, ``"rtx4090"``): its architecture decides which
            kernels run, its capacity whether the step fits. None for CUDA in general: an A100's
            architecture, and memory without end.
        dtype: Parameters and floating inputs are cast to it.
        autocast: What forward and loss are autocast to: ``"bf16"``, or ``"fp16"``, which on CUDA
            takes a gradient scaler. None for no autocast.
        optimizer: None, a name (``"sgd"``, ``"adam"``, ...), a callable from parameters to an
            optimizer, or a TARGET that names one.
        loss: None for the output's ``.loss``, else the sum of its floating tensors; a name
            (``"cross_entropy"``, ``"mse"``, ...), a callable from the output to a scalar, or a
            TARGET that names one.
        loop: The training loop around the model: ``"plain"``, with output and loss held to the
            end of the step; ``"huggingface"`` for ``transformers.Trainer``; ``"lightning"`` for
            ``lightning.Trainer``; one of them with settings (``"huggingface(accumulate=4)"``), or
            a :class:`fxmem.Loop`.
        accumulate: In place of the loop's: how many micro-batches, of the inputs given, add up
            their gradients before the optimizer steps.
        set_to_none: In place of the loop's: whether ``optimizer.zero_grad`` frees gradients.
        hold_outputs: In place of the loop's ``outputs``: True for ``"next step"``, where output
            and loss of the step before live until this one's take their names; False for
            ``"step"``.
        alloc_conf: The allocator's settings, as in ``PYTORCH_ALLOC_CONF``, whose value they are
            if None; for CUDA.
        frontend: ``"fx"`` or ``"record"`` to force a tracer; None takes the first that serves.
        size_hint: How many elements ``nonzero``, boolean masks and the like find; without it a
            model whose sizes depend on data is refused.

    Returns:
        Every number of the step.

    Raises:
        UsageError: An argument that is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> analysis = analyze(nn.Linear(4, 2), ("8x4",), loss="mse")
    >>> analysis.parameter_bytes, analysis.input_bytes
    (40, 192)
    >>> analysis.setup.device
    'cuda'
    """
    options = resolve_options(
        mode=mode,
        inference_mode=inference_mode,
        device=device,
        gpu=gpu,
        dtype=dtype,
        autocast=autocast,
        loop=loop,
        accumulate=accumulate,
        set_to_none=set_to_none,
        hold_outputs=hold_outputs,
        frontend=frontend,
        size_hint=size_hint,
    )
    settings = _find_settings(options.target.name, alloc_conf)
    check_choices(loss, optimizer)
    inputs = gather_inputs(args, kwargs)
    with _prepare(options.target, model, loss, optimizer):
        blueprint = _draw_blueprint(model, *inputs, loss, optimizer, options)
        described = describe_model(blueprint.model)
        given = blueprint.make_inputs()
        check_inputs(blueprint.model, *given)
        specs = describe_inputs(*given)
        served = _record(blueprint, specs)
        other = _record_other_inference(blueprint, specs, served)
    recording = served.recording
    remember_model(recording.fx_graph, described)
    setup = _describe_setup(model, loss, optimizer, specs, blueprint, served)
    analysis = Analysis(setup, recording.graph, settings, options.gpu, recording.fx_graph)
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

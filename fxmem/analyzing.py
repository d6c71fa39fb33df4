"""The analysis of a model: loaded, recorded and described."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxmem.analysis import Analysis
from fxmem.errors import DataDependentError, TraceError, UsageError
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import describe_inputs, make_fake_mode
from fxmem.graph import Category, MemoryGraph
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target
from fxmem.parallelism.layout import Layout, ParallelizeChoice, resolve_layout
from fxmem.recording.size_hints import SizeHint
from fxmem.scripts.generation import record_generation
from fxmem.setup import Setup
from fxmem.tracing.compiled import compare_peaks, is_compiled, read_compile, unwrap_compiled
from fxmem.tracing.modules import describe_model, remember_model
from fxmem.training.blueprint import Blueprint
from fxmem.training.failures import is_traced
from fxmem.training.isolation import isolate_analysis
from fxmem.training.loops import LoopChoice, resolve_loop
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer
from fxmem.training.options import (
    DtypeChoice,
    LossChoice,
    OptimizerChoice,
    Options,
    check_choices,
    check_mode,
    load_choice,
    name_choice,
    resolve_autocast,
    resolve_compilation,
    resolve_device,
    resolve_dtype,
    resolve_frontend,
)
from fxmem.training.step import Recording, record_step
from fxmem.units import format_bytes
from fxmem.versions.release import check_release

_COMPILED = "it is compiled"


def analyze(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    inference_mode: bool = False,
    new_tokens: int = 128,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    reserve: str | int | None = None,
    attention: str | None = None,
    dtype: DtypeChoice = None,
    autocast: DtypeChoice = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    loop: LoopChoice = "plain",
    compile: bool | Mapping[str, Any] | None = None,
    activation_memory_budget: float | None = None,
    accumulate: int | None = None,
    set_to_none: bool | None = None,
    hold_outputs: bool | None = None,
    alloc_conf: str | None = None,
    frontend: str | None = None,
    size_hint: SizeHint = None,
    routing: str | Sequence[float] = "balanced",
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
    rank: int | str = 0,
) -> Analysis:
    """Measures the memory of a step of a model: its peak, and what is alive there.

    The step runs twice on fake tensors, which have no memory, and the second run is reported:
    ``zero_grad(set_to_none=True)``, forward, loss, backward, ``optimizer.step()``, in the order
    of the training loop.

    Args:
        model: A module with real, meta or fake parameters, which is left unchanged; or a TARGET
            such as ``"module:Model"``, which is built without allocating its parameters.
        args: Positional inputs, in a tuple: tensors, :class:`fxmem.TensorSpec` or
            ``"8x3x224x224:bf16"``. A single input needs no tuple.
        kwargs: Keyword inputs, of the same kinds.
        mode: ``"train"``; ``"infer"`` for ``eval()`` under ``no_grad()``; or ``"generate"`` for the
            model's ``generate()``, of which the inputs are the prompt.
        inference_mode: With ``mode="infer"``, run under ``torch.inference_mode()`` instead, where
            autocast keeps no casts of weights.
        new_tokens: With ``mode="generate"``, how many tokens are generated.
        device: Target device (need not be present): ``"cuda"``, whose peak is to be compared
            with ``torch.cuda.max_memory_allocated()``, or ``"cpu"`` for training on the CPU.
        gpu: The target GPU (``"h100"``, ``"rtx4090"``): its architecture decides which kernels
            run, its capacity whether the step fits. None for an A100's architecture and
            unlimited memory.
        reserve: Memory of the GPU that is kept for others, such as an engine that serves beside a
            training, in bytes or as ``"12GiB"``.
        attention: What ``scaled_dot_product_attention`` tries first: ``"flash"``, ``"cudnn"``,
            ``"efficient"`` or ``"math"``. None for PyTorch's order on that GPU.
        dtype: The dtype that parameters and floating inputs are cast to.
        autocast: The dtype that forward and loss are autocast to: ``"bf16"``, or ``"fp16"``,
            which takes a gradient scaler on CUDA. None for no autocast.
        optimizer: None, a name (``"sgd"``, ``"adam"``, ...), a callable from parameters to an
            optimizer, or a TARGET that names one.
        loss: None for the output's ``.loss``, else the sum of its floating tensors; a name
            (``"cross_entropy"``, ``"mse"``, ...), a callable from the output to a scalar, or a
            TARGET that names one.
        loop: The training loop around the model: ``"plain"``, with output and loss held to the
            end of the step; ``"huggingface"`` for ``transformers.Trainer``; ``"lightning"`` for
            ``lightning.Trainer``; ``"fabric"`` for ``lightning.Fabric``; one of them with
            settings (``"huggingface(accumulate=4)"``); or a function of a
            :class:`fxmem.training.training.Training`, or a TARGET that names one.
        compile: True, or arguments of ``torch.compile``, to compile the model, after it is laid
            out on a mesh; False for eager figures. None compiles what the code compiles.
        activation_memory_budget: The share of the activations kept by default that compiled code
            may keep for backward, in place of the code's own
            ``torch._functorch.config.activation_memory_budget``.
        accumulate: Overrides the loop's number of micro-batches, each of the inputs given, whose
            gradients add up before the optimizer steps.
        set_to_none: Overrides whether the loop's ``optimizer.zero_grad`` frees gradients.
        hold_outputs: Overrides the loop's ``outputs``: True keeps the previous step's output and
            loss alive until reassigned (``"next step"``), False to the end of the ``"step"``.
        alloc_conf: Settings of the CUDA caching allocator, as in ``PYTORCH_ALLOC_CONF``, whose
            value is the default.
        frontend: ``"fx"`` or ``"record"`` to force a tracer; None takes the first that serves.
        size_hint: How many elements ``nonzero``, boolean masks and the like find, in all lines
            or by line, ``{"expert.py:31": 512}``; without it a model whose sizes depend on data
            is refused.
        routing: The experts that unknown tokens are sent to: ``"balanced"``; ``"worst"`` for all to
            the same; or how many go to each, in any unit. A note has the peak of the worst, or of
            the balanced one.
        mesh: Names and sizes of the dimensions of a ``DeviceMesh``, ``{"dp": 8, "tp": 4}``: the
            step is that of one rank of so many processes, which need not be there.
        parallelize: A function ``parallelize(model, mesh)`` that parallelizes the model
            (``fully_shard``, ``parallelize_module``, ``DistributedDataParallel``, ...) and
            returns it, or None where it changes it in place; or a TARGET that names one;
            ``"fsdp"`` for ``fully_shard`` on each repeated block and the root; ``"ddp"``.
        rank: The rank that is analysed; ``"worst"`` for the one with the highest peak.

    Returns:
        Every number of the step; sizes are integers in bytes.

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> from torch import nn
    >>> analysis = analyze(nn.Linear(4, 2), ("8x4",), loss="mse")
    >>> analysis.parameter_bytes, analysis.input_bytes
    (40, 192)
    >>> analysis.setup.device
    'cuda'
    """
    check_release()
    options = resolve_device(device, gpu, attention, alloc_conf, size_hint, reserve, routing)
    check_mode(mode, inference_mode)
    layout = resolve_layout(mesh, parallelize, rank)
    outputs = None if hold_outputs is None else "next step" if hold_outputs else "step"
    settings = {"accumulate": accumulate, "set_to_none": set_to_none, "outputs": outputs}
    named_loop, run_loop = resolve_loop(loop, settings)
    options = replace(
        options,
        mode=mode,
        inference_mode=inference_mode,
        dtype=resolve_dtype(dtype),
        autocast=resolve_autocast(autocast, options.target),
        loop=named_loop,
        run_loop=run_loop,
        frontend=resolve_frontend(frontend, layout),
        compilation=resolve_compilation(compile, activation_memory_budget),
        layout=layout,
    )
    check_choices(loss, optimizer)
    inputs = gather_inputs(args, kwargs)
    if mode == "generate" and (optimizer is not None or loss is not None or compile):
        cause = "generation takes no optimizer and no loss, and is not compiled"
        raise UsageError(cause, hint="leave them out; a script may compile its model")

    analyze_rank = functools.partial(_analyze, model, *inputs, loss, optimizer)
    if mode == "generate":
        analyze_rank = functools.partial(_analyze_generation, model, *inputs, new_tokens)

    if layout is not None and layout.rank == "worst":
        ranks = (replace(options, layout=each) for each in layout.list_differing())
        return _choose_worst([analyze_rank(each) for each in ranks])
    return analyze_rank(options)


def _analyze_generation(
    model: nn.Module | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    new_tokens: int,
    options: Options,
) -> Analysis:
    with isolate_analysis(model, options=options, layout=options.layout):
        found = record_generation(model, args, kwargs, options, new_tokens)
    setup = describe_setup(
        model if isinstance(model, str) else type(unwrap_compiled(model)).__name__,
        describe_inputs(args, kwargs),
        options,
        None,
        None,
        frontend=found.setup.frontend,
        notes=found.setup.notes,
        compile=found.setup.compile,
        **_describe_layout(options.layout),
    )
    return replace(found, setup=setup)


def _analyze(
    model: nn.Module | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossChoice,
    optimizer: OptimizerChoice,
    chosen: Options,
) -> Analysis:
    """Records a step with checked options, and describes it."""
    other, routed, layout = None, None, chosen.layout
    choices = (model, loss, optimizer, layout and layout.parallelize)
    with isolate_analysis(*choices, options=chosen, layout=layout):
        blueprint = _draw_blueprint(model, args, kwargs, loss, optimizer, chosen)
        described = describe_model(blueprint.model)
        given = blueprint.make_inputs()
        check_inputs(blueprint.model, *given)
        specs = describe_inputs(*given)
        served = record_blueprint(blueprint, specs)
        if chosen.mode == "infer" and served.recording.casts_weights:
            # Memory differs between no_grad and inference_mode, where autocast keeps no casts.
            reverse, frontend = not chosen.inference_mode, served.frontend
            other_options = replace(chosen, inference_mode=reverse, frontend=frontend)
            other = record_blueprint(
                replace(blueprint, options=other_options), specs
            ).recording.graph
        if served.recording.is_routed:
            other_routing = "balanced" if chosen.hints.routing == "worst" else "worst"
            hints = replace(chosen.hints, routing=other_routing)
            routed_options = replace(chosen, hints=hints, frontend="record")
            routed = record_blueprint(
                replace(blueprint, options=routed_options), specs
            ).recording.graph
    graph = served.recording.fx_graph
    remember_model(graph, described)
    setup = describe_setup(
        model if isinstance(model, str) else type(unwrap_compiled(model)).__name__,
        specs,
        chosen,
        optimizer,
        loss,
        frontend=served.frontend,
        frontend_reason=served.reason,
        notes=tuple(_list_notes(blueprint, served.recording, loss=loss, optimizer=optimizer)),
        compile=read_compile(served.recording.notes),
        **_describe_layout(layout),
    )
    blueprint = replace(blueprint, args=given[0], kwargs=given[1])  # fakes, which take no memory
    analysis = Analysis(
        setup, served.recording.graph, chosen.settings, chosen.gpu, graph, blueprint
    )
    if setup.compile == "compiled":
        analysis = _note_eager(analysis)
    if routed is not None:
        analysis = _note_routing(analysis, routed, is_worst=other_routing == "worst")
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


def _note_eager(analysis: Analysis) -> Analysis:
    """Notes the peak of a compiled step in eager mode."""
    try:
        eager = analyze_again(analysis, compilation=None, frontend="record")
    except TraceError:  # flex_attention is for compiled code
        return analysis
    return _add_note(analysis, compare_peaks(eager.peak_bytes, analysis.peak_bytes))


def _note_other_mode(analysis: Analysis, other: MemoryGraph) -> Analysis:
    """Notes the peak under the other mode without gradients, if it differs."""
    peak_bytes = replace(analysis, graph=other).peak_bytes
    if peak_bytes == analysis.peak_bytes:
        return analysis
    under, keeps = "torch.inference_mode() (inference_mode=True, --inference-mode)", "no"
    if analysis.setup.inference_mode:
        under, keeps = "torch.no_grad()", "its"
    peak = format_bytes(peak_bytes)
    note = f"Under {under} the peak is {peak}: autocast keeps {keeps} casts of weights there."
    return _add_note(analysis, note)


def _note_routing(analysis: Analysis, other: MemoryGraph, *, is_worst: bool) -> Analysis:
    """Notes the peak of the other routing of tokens to experts."""
    peak = format_bytes(replace(analysis, graph=other).peak_bytes)
    way = "even over the experts (routing='balanced', --routing balanced)"
    if is_worst:
        way = "all at the same experts (routing='worst', --routing worst)"
    return _add_note(analysis, f"With tokens {way} the peak is {peak}.")


def _choose_worst(analyses: Sequence[Analysis]) -> Analysis:
    """Chooses the rank with the highest peak, and notes the lowest one."""
    worst = max(analyses, key=lambda analysis: analysis.peak_bytes)
    least = min(analyses, key=lambda analysis: analysis.peak_bytes)
    world_size = math.prod((worst.setup.mesh or {}).values())
    note = f"All {world_size} ranks have the same peak."
    if least.peak_bytes < worst.peak_bytes:
        rank, peak = least.setup.rank, format_bytes(least.peak_bytes)
        note = f"Of the ranks compared, {rank} has the lowest peak: {peak}."
    return _add_note(worst, note)


def _add_note(analysis: Analysis, note: str) -> Analysis:
    setup = replace(analysis.setup, notes=(*analysis.setup.notes, note))
    return replace(analysis, setup=setup)


def _describe_layout(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    parallelize = name_choice(layout.parallelize)
    return {"mesh": dict(layout.mesh), "parallelize": parallelize, "rank": layout.rank}


def analyze_again(analysis: Analysis, **changes: Any) -> Analysis:
    """Records an analysed step again, with its model as it has been changed since.

    ``changes`` are options that differ, by their names in :class:`Options`.
    """
    options = replace(analysis.blueprint.options, **changes)
    blueprint, layout = replace(analysis.blueprint, options=options), options.layout
    with isolate_analysis(layout and layout.parallelize, options=options, layout=layout):
        recording = record_blueprint(blueprint, analysis.setup.inputs).recording
    return replace(
        analysis, graph=recording.graph, fx_graph=recording.fx_graph, blueprint=blueprint
    )


def trace_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> tuple[fx.Graph, str]:
    """Traces the forward of a model once, without recording the step.

    Returns:
        The FX graph, and what it cannot express.
    """
    inputs = gather_inputs(args, kwargs)
    with isolate_analysis(model, options=options):
        return _draw_blueprint(model, *inputs, None, None, options).trace()


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


def record_blueprint(blueprint: Blueprint, inputs: Sequence[str]) -> Served:
    """Records the step with the frontend asked for, else with the first that serves.

    Sizes stay nodes for ``fx``, and are numbers for ``record``.

    Raises:
        TraceError: The step fails, or ``fx`` was asked for and cannot express the model.
    """
    options, frontend = blueprint.options, blueprint.options.frontend
    record = functools.partial(record_step, target=options.target, hints=options.hints)
    reason = "record was asked for" if options.layout is None else ""
    compilation = options.compilation
    if compilation and (compilation.model is not None or is_compiled(blueprint.model)):
        if frontend == "fx":
            raise _refuse_fx(_COMPILED)
        frontend, reason = "record", _COMPILED
    if frontend != "record":
        try:
            with blueprint.prepare_step(inputs) as step:
                recording = record(step, symbolic_sizes=True)
        except DataDependentError:
            raise
        except TraceError as error:
            # An error that did not pass through the tracer would come again without it.
            if frontend == "fx" or not is_traced(error.__cause__ or error):
                raise
            reason = error.cause
        else:
            reason = recording.reason or _explain_hints(blueprint, recording)
            if read_compile(recording.notes) == "compiled":
                reason = _COMPILED
            if reason and frontend == "fx":
                raise _refuse_fx(reason)
            return Served(recording, "record" if reason else "fx", reason)
    with blueprint.prepare_step(inputs) as step:
        return Served(record(step, symbolic_sizes=False), "record", reason)


def _refuse_fx(reason: str) -> TraceError:
    return TraceError(
        f"the fx frontend cannot express this model: {reason}",
        hint="leave the frontend out, and record will serve",
    )


def _explain_hints(blueprint: Blueprint, recording: Recording) -> str:
    """Explains why a graph is for the sizes alone that were assumed of data; empty if it is not."""
    depends = recording.is_routed or blueprint.options.size_hint is not None
    is_hinted = depends and blueprint.is_hinted(recording.fx_graph)
    return "its code goes by a size that depends on data" if is_hinted else ""


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

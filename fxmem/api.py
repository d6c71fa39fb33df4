"""The public functions: from a model to an analysis."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxmem.allocator import AllocatorSettings, parse_settings
from fxmem.analysis import Analysis, Setup
from fxmem.devices import GpuModel, find_gpu
from fxmem.errors import DataDependentError, FxmemError, TraceError, UsageError
from fxmem.graph import Category, MemoryGraph, Operation
from fxmem.lowering.cpu import CPU
from fxmem.lowering.cuda import CUDA
from fxmem.lowering.cuda.autocast import allow_autocast
from fxmem.lowering.cuda.target import Gpu, use_gpu
from fxmem.lowering.target import Target
from fxmem.recording.constants import remember_inputs
from fxmem.recording.failures import explain_failure, is_traced
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.placement import place_inputs, place_model
from fxmem.recording.step import Recording, Step, record_step
from fxmem.specs import parse_dtype
from fxmem.tracing.arguments import check_inputs, check_model, gather_inputs
from fxmem.tracing.building import replace_converted, silence_fake_kernels
from fxmem.tracing.description import describe_model, remember_model
from fxmem.tracing.devices import keep_default_on_cpu, replace_devices
from fxmem.tracing.fakes import describe_inputs, make_fake_inputs, make_fake_mode, make_fake_model
from fxmem.tracing.lazy import settle_lazy
from fxmem.tracing.loading import load_function, load_target, prepare_targets
from fxmem.tracing.targets import is_target
from fxmem.tracing.user_state import restore_user_state
from fxmem.units import format_bytes

MODES = ("train", "infer")
FRONTENDS = ("fx", "record")
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""``maxThreadsPerMultiProcessor`` by compute capability, where it is not 2048."""
TARGETS = {target.name: target for target in (CUDA, CPU)}

_Loss = str | Callable[[Any], torch.Tensor] | None
_Optimizer = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None


def analyze(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    device: str = "cuda",
    gpu: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    optimizer: _Optimizer = None,
    loss: _Loss = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    hold_outputs: bool = False,
    alloc_conf: str | None = None,
    frontend: str | None = None,
    size_hint: int | None = None,
) -> Analysis:
    """How much memory a step of a model takes, when it peaks and what is alive there.

    The step runs twice on fake tensors, which have no memory, and the second run is reported:
    ``zero_grad(set_to_none=True)``, forward, loss, backward, ``optimizer.step()``, with output
    and loss held to the end.

    Args:
        model: A module with real, meta or fake parameters, which is left alone; or a TARGET
            such as ``"module:Model"``, which is built without allocating its parameters.
        args: Positional inputs, in a tuple: tensors, :class:`fxmem.TensorSpec` or
            ``"8x3x224x224:bf16"``. One that is alone needs no tuple.
        kwargs: Keyword inputs, likewise.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
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
        accumulate: How many micro-batches, of the inputs given, add up their gradients before
            the optimizer steps. As in a plain loop, output and loss of one live until those of
            the next take their names.
        set_to_none: As that of ``optimizer.zero_grad``: whether gradients are freed before the
            step.
        hold_outputs: Whether output and loss of the step before live until this one's take their
            names, as in a training loop that never deletes them.
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
    device = str(device)  # a torch.device has its name
    _check_arguments(mode, device, frontend, size_hint, accumulate)
    step_gpu, settings = _find_gpu(device, gpu), _find_settings(device, alloc_conf)
    architecture = _describe_architecture(step_gpu)
    autocast = _name_autocast(autocast)
    autocast_to = _find_autocast(device, autocast)
    dtype_name = None if dtype is None else parse_dtype(str(dtype).removeprefix("torch."))
    # A misspelt name is told before anything is imported.
    if not is_target(optimizer):
        resolve_optimizer(optimizer)
    if not is_target(loss):
        resolve_loss(loss)
    positional, named = gather_inputs(args, kwargs)
    target, train = TARGETS[device], mode == "train"
    fake_mode = make_fake_mode()
    named_devices: set[str] = set()
    believes_in_gpu = allow_autocast() if target is CUDA else contextlib.nullcontext()
    with (
        torch.inference_mode(False),  # the caller may be in one, or in no_grad
        torch.enable_grad(),
        prepare_targets(model, loss, optimizer),
        silence_fake_kernels(),
        believes_in_gpu,
    ):
        with replace_devices(named_devices):
            source = load_target(model, fake_mode) if isinstance(model, str) else model
            make_optimizer = resolve_optimizer(load_choice(optimizer))
            step_loss = resolve_loss(load_choice(loss))
        check_model(source)
        described = describe_model(source)

        def make_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
            with keep_default_on_cpu():
                made = make_fake_inputs(positional, named, fake_mode, dtype=dtype_name)
            remember_inputs(made, (positional, named))
            return made

        given = make_inputs()
        check_inputs(source, *given)

        def make_step() -> Step:
            inputs = make_inputs()  # each run its own: it may change a cache among them
            with keep_default_on_cpu():
                fake_model = make_fake_model(source, fake_mode, dtype=dtype_name, train=train)
            place_inputs(inputs, CPU)
            with replace_devices(named_devices):
                settle_lazy(fake_model, *inputs, fake_mode)
            place_model(fake_model, source, target)
            place_inputs(inputs, target)
            return Step(
                model=fake_model,
                args=inputs[0],
                kwargs=inputs[1],
                train=train,
                loss=step_loss,
                make_optimizer=make_optimizer if train else None,
                accumulate=accumulate,
                set_to_none=set_to_none,
                autocast=autocast_to,
                holds_previous=hold_outputs,
            )

        def run(symbolic_sizes: bool) -> Recording:
            try:
                step = make_step()
                with (
                    replace_devices(named_devices, target.device),
                    use_gpu(architecture),
                    replace_converted(),
                ):
                    return record_step(
                        step, target, symbolic_sizes=symbolic_sizes, size_hint=size_hint
                    )
            except FxmemError:
                raise
            except (Exception, SystemExit) as error:
                raise explain_failure(error, describe_inputs(*given), size_hint) from error

        kinds = {type(module) for module in source.modules()}
        with restore_user_state([*kinds, step_loss, make_optimizer]), fake_mode:
            recording, frontend, reason = _record(run, frontend)
    setup = Setup(
        model=model if isinstance(model, str) else type(model).__name__,
        inputs=describe_inputs(*given),
        mode=mode,
        device=device,
        autocast=autocast,
        gpu=step_gpu.name if step_gpu else None,
        optimizer=name_choice(optimizer),
        loss=name_choice(loss),
        frontend=frontend,
        frontend_reason=reason,
        notes=(
            *_note_devices(named_devices, device),
            *_note_unused(mode, loss, optimizer),
            *_note_held(recording.graph),
            *recording.notes,
            *_note_unmodelled(recording.graph.operations, target),
        ),
        size_hint=size_hint,
    )
    remember_model(recording.fx_graph, described)
    return Analysis(setup, recording.graph, settings, step_gpu, recording.fx_graph)


def load_choice(choice: Any) -> Any:
    """A loss or an optimizer that is given as a TARGET; anything else as it is."""
    return load_function(choice) if is_target(choice) else choice


def _note_devices(named: Iterable[str], target: str) -> Iterator[str]:
    others = sorted(name for name in named if not name.startswith(target))
    if others:
        yield f"The code names devices ({', '.join(others)}): taken as the target, {target}."


def _note_unused(mode: str, loss: object, optimizer: object) -> Iterator[str]:
    unused = [
        name
        for name, choice in (("loss", loss), ("optimizer", optimizer))
        if mode == "infer" and choice is not None
    ]
    if unused:
        yield f"Inference leaves out the {' and the '.join(unused)}."


def _note_held(graph: MemoryGraph) -> Iterator[str]:
    held = [s for s in graph.storages if s.category is Category.OUTPUT and s.born < 0]
    if held:
        nbytes = format_bytes(sum(storage.nbytes for storage in held))
        yield f"Results of the step before take {nbytes} until those of this one are there."


def _note_unmodelled(operations: Iterable[Operation], target: Target) -> Iterator[str]:
    known = {str(operator): reason for operator, reason in target.unmodelled.items()}
    for name in dict.fromkeys(o.name for o in operations if o.name in known):
        yield f"What {name} holds inside itself is not counted: {known[name]}."


def _record(run: Callable[[bool], Recording], frontend: str | None) -> tuple[Recording, str, str]:
    """Records with the frontend asked for, else with the first that serves.

    Args:
        run: Records a step, with sizes that stay nodes or without.
        frontend: The frontend asked for.

    Returns:
        The recording, the frontend, and why ``fx`` did not serve.
    """
    reason = ""
    if frontend != "record":
        try:
            recording = run(True)
        except DataDependentError:
            raise
        except TraceError as error:
            # What is no fault of sizes that are nodes fails in `record` again.
            if frontend == "fx" or not is_traced(error.__cause__ or error):
                raise
            reason = error.cause
        else:
            if frontend == "fx" and recording.reason:
                raise TraceError(
                    f"the fx frontend cannot express this model: {recording.reason}",
                    hint="leave the frontend out, and record will serve",
                )
            if not recording.reason:
                return recording, "fx", ""
            return recording, "record", recording.reason
    recording = run(False)
    return recording, "record", reason or "record was asked for"


def _check_arguments(
    mode: str, device: str, frontend: str | None, size_hint: int | None, accumulate: int
) -> None:
    if mode not in MODES:
        raise UsageError(
            f"unknown mode {mode!r}",
            hint="did you mean infer?" if mode == "eval" else "train or infer",
        )
    if device not in TARGETS:
        raise UsageError(f"unknown device {device!r}", hint=" or ".join(TARGETS))
    if frontend not in (None, *FRONTENDS):
        raise UsageError(f"unknown frontend {frontend!r}", hint="fx or record")
    if size_hint is not None and not (isinstance(size_hint, int) and size_hint >= 0):
        raise UsageError(
            f"size hint {size_hint!r} is no number of elements", hint="an integer, 0 or more"
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise UsageError(f"{accumulate!r} micro-batches make no step", hint="an integer, 1 or more")


def _find_gpu(device: str, gpu: str | None) -> GpuModel | None:
    if gpu is None:
        return None
    if device != "cuda":
        raise UsageError(f"gpu={gpu!r} with device={device!r}", hint="leave one of them out")
    return find_gpu(gpu)


def _describe_architecture(gpu: GpuModel | None) -> Gpu:
    if gpu is None:
        return Gpu()
    return Gpu(
        capability=gpu.capability,
        multiprocessors=gpu.multiprocessors,
        threads_per_multiprocessor=_THREADS.get(gpu.capability, 2048),
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


def _name_autocast(autocast: object) -> str | None:
    if autocast is None or isinstance(autocast, str | torch.dtype):
        return None if autocast is None else str(autocast).removeprefix("torch.")
    raise UsageError(f"autocast={autocast!r} is no dtype", hint="bf16, fp16, or None for none")


def _find_autocast(device: str, autocast: str | None) -> torch.dtype | None:
    if autocast is None:
        return None
    name = parse_dtype(autocast)
    if name not in ("bfloat16", "float16"):
        raise UsageError(f"autocast to {name}", hint="bf16 or fp16")
    if device == "cpu" and name == "float16":
        raise UsageError("autocast to float16 on the CPU is not modelled", hint="bf16")
    return getattr(torch, name)  # type: ignore[no-any-return]


def name_choice(choice: Any) -> str | None:
    """How a loss or an optimizer is called in a report."""
    if choice is None or isinstance(choice, str):
        return choice
    return str(getattr(choice, "__name__", type(choice).__name__))

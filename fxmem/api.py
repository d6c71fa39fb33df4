"""The public functions: from a model to an analysis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from fxmem.analysis import Analysis, Setup
from fxmem.errors import DataDependentError, FxmemError, TraceError, UsageError
from fxmem.lowering.cpu import CPU
from fxmem.lowering.cuda import CUDA
from fxmem.lowering.target import Target
from fxmem.recording.constants import remember_inputs
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.step import Recording, Step, record_step
from fxmem.specs import parse_dtype
from fxmem.tracing.fakes import describe_inputs, make_fake_inputs, make_fake_mode, make_fake_model
from fxmem.tracing.lazy import settle_lazy
from fxmem.tracing.loading import load_target
from fxmem.tracing.placement import place_inputs, place_model
from fxmem.tracing.source import find_raising_source

MODES = ("train", "infer")
FRONTENDS = ("fx", "record")
TARGETS = {target.name: target for target in (CPU, CUDA)}

_Loss = str | Callable[[Any], torch.Tensor] | None
_Optimizer = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None


def analyze(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    device: str = "cpu",
    gpu: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | None = None,
    optimizer: _Optimizer = None,
    loss: _Loss = None,
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
        args: Positional inputs: tensors, :class:`fxmem.TensorSpec` or ``"8x3x224x224:bf16"``.
        kwargs: Keyword inputs, likewise.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
        device: Target device. ``"cpu"``; CUDA is not modelled yet.
        gpu: For CUDA.
        dtype: Parameters and floating inputs are cast to it.
        autocast: For CUDA.
        optimizer: None, a name (``"sgd"``, ``"adam"``, ...) or a callable from parameters to an
            optimizer.
        loss: None for the output's ``.loss``, else the sum of its floating tensors;
            ``"cross_entropy"``, ``"mse"``, or a callable from the output to a scalar.
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
    """
    _check_arguments(mode, device, gpu, autocast, frontend, size_hint)
    dtype_name = None if dtype is None else parse_dtype(str(dtype).removeprefix("torch."))
    target = TARGETS[device]
    make_optimizer, step_loss = resolve_optimizer(optimizer), resolve_loss(loss)
    args = args if isinstance(args, (tuple, list)) else (args,)
    fake_mode = make_fake_mode()
    source = load_target(model, fake_mode) if isinstance(model, str) else model
    inputs = make_fake_inputs(args, kwargs or {}, fake_mode, dtype=dtype_name)
    remember_inputs(inputs, (tuple(args), dict(kwargs or {})))
    _check_inputs(source, *inputs)

    def make_step() -> Step:
        train = mode == "train"
        fake_model = make_fake_model(source, fake_mode, dtype=dtype_name, train=train)
        place_inputs(inputs, CPU.device)
        settle_lazy(fake_model, *inputs, fake_mode)
        place_model(fake_model, target.device)
        place_inputs(inputs, target.device)
        return Step(fake_model, *inputs, train, step_loss, make_optimizer if train else None)

    with fake_mode:
        recording, frontend, reason = _record(make_step, target, frontend, size_hint)
    setup = Setup(
        model=model if isinstance(model, str) else type(model).__name__,
        inputs=describe_inputs(*inputs),
        mode=mode,
        device=device,
        optimizer=_name_choice(optimizer),
        loss=_name_choice(loss),
        frontend=frontend,
        frontend_reason=reason,
    )
    return Analysis(setup, recording.graph)


def _record(
    make_step: Callable[[], Step], target: Target, frontend: str | None, size_hint: int | None
) -> tuple[Recording, str, str]:
    """Records with the frontend asked for, else with the first that serves.

    Returns:
        The recording, the frontend, and why ``fx`` did not serve.
    """
    reason = ""
    if frontend != "record":
        try:
            recording = _run(make_step, target, size_hint, symbolic_sizes=True)
        except DataDependentError:
            raise
        except TraceError as error:
            # What is no fault of sizes that are nodes fails in `record` again, and is told there.
            if frontend == "fx":
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
    recording = _run(make_step, target, size_hint, symbolic_sizes=False)
    return recording, "record", reason or "record was asked for"


def _run(
    make_step: Callable[[], Step],
    target: Target,
    size_hint: int | None,
    *,
    symbolic_sizes: bool,
) -> Recording:
    """Records a step, and says in one line what went wrong where."""
    try:
        return record_step(
            make_step(),
            target,
            symbolic_sizes=symbolic_sizes,
            size_hint=size_hint,
        )
    except FxmemError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = find_raising_source(error.__traceback__)
        raise DataDependentError(
            f"{error.func} at {where or 'an unknown line'} depends on the values of a tensor",
            hint="give a size hint (size_hint=, --size-hint), or take this line out of the model",
        ) from error
    except Exception as error:
        where = find_raising_source(error.__traceback__)
        lines = str(error).strip().splitlines() or [""]
        at = f" at {where}" if where else ""
        raise TraceError(
            f"the step failed{at}: {type(error).__name__}: {lines[0]}",
            hint="check shapes and dtypes of the inputs",
        ) from error


def _check_arguments(
    mode: str,
    device: str,
    gpu: str | None,
    autocast: str | None,
    frontend: str | None,
    size_hint: int | None,
) -> None:
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}", hint="train or infer")
    if gpu is not None or autocast is not None:
        asked = "gpu=" if gpu is not None else "autocast="
        raise UsageError(f"{asked} is not modelled yet", hint="device='cpu' is")
    if device not in TARGETS:
        raise UsageError(f"unknown device {device!r}", hint=" or ".join(TARGETS))
    if frontend not in (None, *FRONTENDS):
        raise UsageError(f"unknown frontend {frontend!r}", hint="fx or record")
    if size_hint is not None and size_hint < 0:
        raise UsageError(f"size hint {size_hint} is negative", hint="how many elements are found")


def _check_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Says what forward takes, if the inputs do not fit its signature."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"the inputs do not fit {type(model).__name__}.forward{signature}: {error}",
            hint="one input for each argument without a default",
        ) from None


def _name_choice(choice: Any) -> str | None:
    if choice is None or isinstance(choice, str):
        return choice
    return str(getattr(choice, "__name__", type(choice).__name__))

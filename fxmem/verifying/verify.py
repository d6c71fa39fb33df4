"""Two models run side by side: the same numbers, bit for bit, and what each takes for them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.applying.applying import apply
from fxmem.applying.state import keep_state, seed_random_numbers
from fxmem.applying.verification import Promise, StepFigures, Verification
from fxmem.errors import FxmemError, UsageError
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.planning.applied import measure_plan
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.plan import Plan
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.options import (
    LossChoice,
    OptimizerChoice,
    check_choices,
    check_mode,
    load_choice,
    name_choice,
)
from fxmem.specs import TensorSpec, parse_dtype, strip_torch
from fxmem.tracing.fakes import describe_inputs, read_leaf
from fxmem.units import format_bytes
from fxmem.verifying.running import Inputs, Runner, make_inputs
from fxmem.verifying.side_by_side import check_repetition, compare_models

_MOST_DEVIATION = 0.01
"""Of a measured peak from the promised one, either way."""
_AMONG = "the models differ in their"


def verify(
    model: nn.Module,
    planned: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    steps: int = 3,
    seed: int = 0,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    autocast: str | torch.dtype | None = None,
) -> Verification:
    """Compares real steps of two models: :func:`fxmem.verify`, whose arguments these are."""
    _check_options(mode, steps, seed)
    cast_to = _find_autocast(autocast)
    check_model(model)
    check_model(planned)
    _check_names(model, planned)
    positional, named = gather_inputs(args, kwargs)
    device = _find_device(model)
    given = make_inputs(positional, named, device, seed)
    check_inputs(model, *given)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        prepare_targets(loss, optimizer),
    ):
        step_loss = resolve_loss(load_choice(loss))
        make_optimizer = resolve_optimizer(load_choice(optimizer))
        ours, theirs = (
            Runner(m, given, step_loss, make_optimizer, device, cast_to, mode == "train")
            for m in (model, planned)
        )
        with keep_state([*ours.roots, *theirs.roots]):
            comparison = compare_models(ours, theirs, steps, seed)
        # Each from the state before, so that neither holds what the other's steps left.
        peaks = [_measure(ours, seed), _measure(theirs, seed) if comparison.runs else None]
        with keep_state(ours.roots):
            notes = check_repetition(ours, comparison, seed)
    plan = getattr(planned, "plan", None)
    options: dict[str, Any] = {
        "mode": mode,
        "optimizer": optimizer,
        "loss": loss,
        "autocast": autocast,
        "size_hint": plan.size_hint if isinstance(plan, Plan) else None,
    }
    analyses, missing = _analyse((model, planned), given, device, options)
    figures = [
        StepFigures(
            peak,
            None if analysis is None else analysis.peak_bytes,
            statistics.median(times) if times else None,
        )
        for peak, analysis, times in zip(peaks, analyses, comparison.times_s, strict=True)
    ]
    promise, why = _find_promise(plan, analyses[0], peaks[1])
    return Verification(
        equal=not comparison.differences,
        model=type(model).__name__,
        inputs=describe_inputs(*given),
        mode=mode,
        device=device.type,
        optimizer=name_choice(optimizer),
        loss=name_choice(loss),
        autocast=None if cast_to is None else strip_torch(cast_to),
        seed=seed,
        steps=comparison.steps,
        compared=dict(Counter(kind.value for kind, _ in comparison.record)),
        differences=comparison.differences,
        baseline=figures[0],
        planned=figures[1],
        notes=(*notes, *missing, *why),
        promise=promise,
    )


def verify_target(
    target: str,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Verification:
    """As :func:`verify`, for a model that a TARGET names and a plan for it.

    Args:
        target: The TARGET; it is built for real, with the parameters that the seed gives.
        plan: What is applied to it.
        args: Positional inputs.
        kwargs: Keyword inputs.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        dtype: What parameters and floating inputs are cast to.
        options: The other arguments of :func:`verify`.

    Raises:
        LoadError: The TARGET cannot be loaded.
        UsageError: The device is not there, or the plan is not for this model.
    """
    is_there = torch.cuda.is_available()
    if device == "cuda" and not is_there:
        raise UsageError("there is no GPU to verify on", hint="--device cpu")
    cast_to = _find_autocast(options.get("autocast"))
    check_choices(options.get("loss"), options.get("optimizer"))
    with (
        prepare_targets(target, options.get("loss"), options.get("optimizer")),
        keep_state([]),
    ):
        seed_random_numbers(options.get("seed", 0))
        model = load_target(target, None)
        if dtype is not None:
            model = model.to(_find_dtype(dtype))
            args, kwargs = _cast_specs(args, dtype), dict(_cast_specs(kwargs, dtype))
        with torch.autocast("cpu", dtype=cast_to, enabled=cast_to is not None):
            planned = apply(model.train(), plan, args, kwargs)
        chosen = device or ("cuda" if is_there else "cpu")
        model.to(chosen)
        found = verify(model, planned, args, kwargs, mode=plan.mode, **options)
        return replace(found, model=target)


def _check_options(mode: Any, steps: Any, seed: Any) -> None:
    check_mode(mode)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"{steps!r} steps show nothing", hint="an integer, 1 or more")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError(f"a seed cannot be {seed!r}", hint="an integer, 0 or more")


def _find_autocast(autocast: object) -> torch.dtype | None:
    if autocast is None:
        return None
    name = parse_dtype(autocast)
    if name != "bfloat16":
        raise UsageError(
            f"models are not compared under autocast to {name}", hint="bf16, which needs no scaler"
        )
    return torch.bfloat16


def _check_names(model: nn.Module, planned: nn.Module) -> None:
    """Checks that two models have the same parameters and buffers by name, shape and dtype."""
    for kind in ("parameters", "buffers"):
        ours, theirs = (dict(getattr(m, f"named_{kind}")()) for m in (model, planned))
        odd = sorted(ours.keys() ^ theirs.keys())
        if odd:
            raise UsageError(
                f"{_AMONG} {kind}: only one has {odd[0]!r}",
                hint="names must be the same, as after fxmem.apply",
            )
        for name, tensor in ours.items():
            if isinstance(tensor, FakeTensor) or tensor.is_meta or is_lazy(tensor):
                raise UsageError(
                    f"{name!r} has no values to compute with", hint="pass a model with real ones"
                )
            other = theirs[name]
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                raise UsageError(
                    f"{_AMONG} {kind}: {name!r} has another shape or dtype",
                    hint="give both the same",
                )


def _find_device(model: nn.Module) -> torch.device:
    """Where the model is."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device.type}", hint="move it to cuda or the CPU")
    return device


def _find_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, parse_dtype(name))
    if not dtype.is_floating_point:
        raise UsageError(f"a model cannot be cast to {name}", hint="bf16, fp16, float32 or float64")
    return dtype


def _cast_specs(inputs: Any, dtype: str) -> Any:
    """Inputs whose floating specs have another dtype."""

    def cast(leaf: Any) -> Any:
        spec = read_leaf(leaf)
        if isinstance(spec, TensorSpec) and getattr(torch, spec.dtype).is_floating_point:
            return replace(spec, dtype=dtype)
        return leaf

    return tree_map(cast, inputs)


def _measure(runner: Runner, seed: int) -> int:
    with keep_state(runner.roots):
        return runner.measure(seed)


def _analyse(
    models: Iterable[nn.Module], given: Inputs, device: torch.device, options: Mapping[str, Any]
) -> tuple[list[Analysis | None], list[str]]:
    """An analysis of each model for the device where it is, and why there is none of some."""
    analyses: list[Analysis | None] = []
    notes: dict[str, None] = {}
    for model in models:
        try:
            analyses.append(analyze_model(model, *given, device=device.type, **options))
        except FxmemError as error:
            analyses.append(None)
            notes[f"No peak is predicted: {error.cause}."] = None
    return analyses, [*notes]


def _find_promise(
    plan: object, analysis: Analysis | None, peak_bytes: int | None
) -> tuple[Promise | None, list[str]]:
    """The planned model's peak beside the plan's, and what has to be said about that.

    A plan is for one step on one device: where the step without it takes what the plan says that it
    does, its own peak is the promise. On another device, or with another optimizer, it is what
    its planner makes of the same plan there.
    """
    if not isinstance(plan, Plan) or analysis is None or peak_bytes is None:
        return None, []
    if plan.fingerprint != fingerprint_graph(analysis.graph):
        return None, ["No peak is promised: the plan was made for other inputs or another model."]
    if plan.baseline_peak_bytes == analysis.peak_bytes:
        return _hold_against(plan.peak_bytes, peak_bytes, is_plans_own=True), []
    here, _ = measure_plan(analysis, plan)
    own, baseline, other = map(
        format_bytes, (plan.peak_bytes, plan.baseline_peak_bytes, analysis.peak_bytes)
    )
    return _hold_against(here, peak_bytes, is_plans_own=False), [
        f"The plan's own promise, {own}, is for another step or device: without the plan that takes"
        f" {baseline}, and this one {other}. Compared is what the planner says of this one."
    ]


def _hold_against(promised_bytes: int, peak_bytes: int, *, is_plans_own: bool) -> Promise:
    deviation = peak_bytes / promised_bytes - 1
    return Promise(promised_bytes, is_plans_own, deviation, abs(deviation) <= _MOST_DEVIATION)

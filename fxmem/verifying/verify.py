"""Verification of a plan: real steps of two models, compared bit for bit, and measured."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.applying.applying import apply
from fxmem.errors import FxmemError, FxmemWarning, TraceError, UsageError, summarize_error
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.planning.outcome import measure_plan
from fxmem.planning.plan import Plan, fingerprint_graph
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
from fxmem.tracing.source import find_raising_source
from fxmem.units import format_bytes
from fxmem.verifying.comparing import Record, compare_records
from fxmem.verifying.running import (
    Runner,
    keep_state,
    make_inputs,
    save_state,
    seed_random_numbers,
)
from fxmem.verifying.verification import Difference, Kind, Promise, StepFigures, Verification

_MOST_DEVIATION = 0.01
"""The largest deviation of a measured peak from the promised one, either way."""
_HINT = "inputs without values are random, integers 0 or 1; fxmem.verify takes tensors too"
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
    check_mode(mode)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps must be an integer of 1 or more, got {steps!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError(f"seed must be an integer of 0 or more, got {seed!r}")
    cast_to = _parse_autocast(autocast)
    check_model(model)
    check_model(planned)
    _check_names(model, planned)
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device.type}", hint="move it to cuda or the CPU")
    given = make_inputs(*gather_inputs(args, kwargs), device, seed)
    check_inputs(model, *given)
    with torch.inference_mode(False), torch.enable_grad(), prepare_targets(loss, optimizer):
        step_loss = resolve_loss(load_choice(loss))
        make_optimizer = resolve_optimizer(load_choice(optimizer))
        ours, theirs = (
            Runner(m, given, step_loss, make_optimizer, device, cast_to, mode == "train")
            for m in (model, planned)
        )
        with keep_state(model, planned):
            comparison = _compare_steps(ours, theirs, steps, seed)
        peaks: list[int | None] = [None, None]
        for at, runner in enumerate((ours, theirs)):
            if runner is ours or comparison.runs:
                with keep_state(model, planned):  # neither holds what the other's steps left
                    peaks[at] = runner.measure(seed)
        with keep_state(model):
            notes = _check_repetition(ours, comparison, seed)
    plan = getattr(planned, "plan", None)
    options: dict[str, Any] = {
        "mode": mode,
        "optimizer": optimizer,
        "loss": loss,
        "autocast": autocast,
        "size_hint": plan.size_hint if isinstance(plan, Plan) else None,
    }
    analyses: list[Analysis | None] = []
    for each in (model, planned):
        try:
            analyses.append(analyze_model(each, *given, device=device.type, **options))
        except FxmemError as error:
            analyses.append(None)
            notes.append(f"No peak is predicted: {error.cause}.")
    baseline, with_plan = (
        StepFigures(
            peak,
            None if analysis is None else analysis.peak_bytes,
            statistics.median(times) if times else None,
        )
        for peak, analysis, times in zip(peaks, analyses, comparison.times_s, strict=True)
    )
    promise = _find_promise(plan, analyses[0], peaks[1], notes)
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
        baseline=baseline,
        planned=with_plan,
        notes=tuple(dict.fromkeys(notes)),
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
    """Verifies a plan for the model that a TARGET names, which is built for real.

    Args:
        target: The TARGET.
        plan: The plan to apply.
        args: Positional inputs.
        kwargs: Keyword inputs.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        dtype: The dtype that parameters and floating inputs are cast to.
        options: The other arguments of :func:`fxmem.verify`.

    Raises:
        UsageError: The device is missing, or the plan is not for this model.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UsageError("there is no GPU to verify on", hint="--device cpu")
    autocast = _parse_autocast(options.get("autocast"))
    check_choices(options.get("loss"), options.get("optimizer"))
    with prepare_targets(target, options.get("loss"), options.get("optimizer")), keep_state():
        seed_random_numbers(options.get("seed", 0))
        model = load_target(target, None)
        if dtype is not None:
            cast_to: torch.dtype = getattr(torch, parse_dtype(dtype))
            if not cast_to.is_floating_point:
                raise UsageError(
                    f"a model cannot be cast to {dtype}", hint="bf16, fp16, float32 or float64"
                )
            model = model.to(cast_to)

            def cast(leaf: Any) -> Any:
                spec: Any = read_leaf(leaf)
                if isinstance(spec, TensorSpec) and getattr(torch, spec.dtype).is_floating_point:
                    return replace(spec, dtype=parse_dtype(dtype))
                return leaf

            args, kwargs = tree_map(cast, (args, dict(kwargs)))
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            planned = apply(model.train(), plan, args, kwargs)
        model.to(device or ("cuda" if has_gpu else "cpu"))
        found = verify(model, planned, args, kwargs, mode=plan.mode, **options)
        return replace(found, model=target)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Steps of two models beside each other.

    Attributes:
        steps: The number of steps that were compared.
        record: Values that the last step computed in the first model.
        differences: The values that differ in the second model.
        times_s: Seconds of each step, of the first model and of the second.
    """

    steps: int
    record: Record
    differences: tuple[Difference, ...]
    times_s: tuple[list[float], list[float]]

    @property
    def runs(self) -> bool:
        """Tells whether the second model's step works at all."""
        return all(difference.kind is not Kind.ERROR for difference in self.differences)


def _compare_steps(ours: Runner, theirs: Runner, steps: int, seed: int) -> _Comparison:
    """Takes steps of two models in turns, until something differs.

    As long as nothing does, the state after a step of either is the state to go on from: one
    copy of it is enough, from which the second model's step begins where the first one's did.

    Raises:
        TraceError: The first model's step fails.
        UsageError: The second model runs without its plan.
    """
    changed_models = {theirs.model}
    with torch.no_grad():
        for kind in ("parameters", "buffers"):
            values = dict(getattr(ours.model, f"named_{kind}")())
            for name, tensor in getattr(theirs.model, f"named_{kind}")():
                if tensor is values[name]:  # a plan shares all state with its model
                    changed_models.add(ours.model)
                else:
                    tensor.copy_(values[name])
    ours.prepare()
    theirs.prepare()
    seed_random_numbers(seed)
    times: tuple[list[float], list[float]] = ([], [])
    record: Record = {}
    differences: tuple[Difference, ...] = ()
    step = 0
    while step < steps and not differences:
        step += 1
        restore = save_state(*changed_models)
        record, seconds = _run_first(ours)
        times[0].append(seconds)
        restore()
        theirs.target = ours.target
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FxmemWarning)
                their_record, seconds = theirs.run()
        except FxmemWarning as warning:
            raise UsageError(str(warning), hint="make the plan for these inputs") from None
        except Exception as error:
            differences = (Difference(step, Kind.ERROR, "step", _explain(error)),)
        else:
            times[1].append(seconds)
            differences = compare_records(step, record, their_record)
    return _Comparison(step, record, differences, times)


def _check_repetition(ours: Runner, comparison: _Comparison, seed: int) -> list[str]:
    """Notes, where models differ, that the first one differs from itself just as well."""
    if not comparison.differences or not comparison.runs:
        return []
    ours.prepare()
    seed_random_numbers(seed)
    for _ in range(comparison.steps):
        record, _seconds = _run_first(ours)
    differences = compare_records(comparison.steps, comparison.record, record)
    if not differences:
        return []
    first = differences[0]
    return [
        "The model is not deterministic: run again from the same state, it differs from itself "
        f"({first.kind.value} {first.name})."
    ]


def _run_first(runner: Runner) -> tuple[Record, float]:
    try:
        return runner.run()
    except FxmemError:
        raise
    except Exception as error:
        raise TraceError(f"the model's step fails: {_explain(error)}", hint=_HINT) from error


def _explain(error: Exception) -> str:
    where = find_raising_source(error)
    return summarize_error(error) + (f" at {where}" if where else "")


def _parse_autocast(autocast: object) -> torch.dtype | None:
    if autocast is None:
        return None
    name = parse_dtype(autocast)
    if name != "bfloat16":
        raise UsageError(
            f"models are not compared under autocast to {name}", hint="bf16, which needs no scaler"
        )
    return torch.bfloat16


def _check_names(model: nn.Module, planned: nn.Module) -> None:
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


def _find_promise(
    plan: object, analysis: Analysis | None, peak_bytes: int | None, notes: list[str]
) -> Promise | None:
    """Compares the planned model's measured peak with the plan's, and adds notes on that.

    A plan is for one step on one device: where the step without it takes as much as the plan says,
    its own peak is the promise. On another device, or with another optimizer, it is what
    the planner predicts for the same plan there.
    """
    if not isinstance(plan, Plan) or analysis is None or peak_bytes is None:
        return None
    if plan.fingerprint != fingerprint_graph(analysis.graph):
        notes.append("No peak is promised: the plan was made for other inputs or another model.")
        return None
    is_plans_own = plan.baseline_peak_bytes == analysis.peak_bytes
    promised_bytes = plan.peak_bytes
    if not is_plans_own:
        promised_bytes, _ = measure_plan(analysis, plan)
        own, baseline, other = map(
            format_bytes, (plan.peak_bytes, plan.baseline_peak_bytes, analysis.peak_bytes)
        )
        notes.append(
            f"The plan's own promise, {own}, is for another step or device: without the plan that"
            f" takes {baseline}, and this one {other}."
            " Compared is what the planner says of this one."
        )
    deviation = peak_bytes / promised_bytes - 1
    return Promise(promised_bytes, is_plans_own, deviation, abs(deviation) <= _MOST_DEVIATION)

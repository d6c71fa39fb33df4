"""Verification of a plan: real steps of two models, compared bit for bit, and measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.applying.applying import apply
from fxmem.errors import FxmemError, UsageError
from fxmem.fakes.fake_mode import describe_inputs, read_leaf
from fxmem.loading.inputs import Inputs, check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target, prepare_targets
from fxmem.parallelism.layout import Layout, ParallelizeChoice, resolve_layout
from fxmem.planning.outcome import measure_plan
from fxmem.planning.plan import Plan, fingerprint_graph
from fxmem.specs import TensorSpec, parse_dtype, strip_torch
from fxmem.training.options import (
    DtypeChoice,
    LossChoice,
    OptimizerChoice,
    check_choices,
    check_mode,
    name_choice,
)
from fxmem.units import format_bytes
from fxmem.verifying.comparing import compare_records
from fxmem.verifying.rank_processes import compare_ranks
from fxmem.verifying.running import (
    ComparedSteps,
    Runner,
    StepOptions,
    StepTask,
    compare_steps,
    keep_state,
    make_inputs,
    seed_random_numbers,
)
from fxmem.verifying.verification import Kind, Promise, StepFigures, Verification

_MOST_DEVIATION = 0.01
"""The largest deviation of a measured peak from the promised one, either way."""
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
    autocast: DtypeChoice = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
) -> Verification:
    """Runs real steps with and without a plan, and compares them bit for bit.

    Both models take real steps from the same state, with the same inputs and random numbers, on
    the model's device. Compared after each step: output, loss, every gradient, buffer and
    parameter, the optimizer's state, inputs that were changed, and the states of all random number
    generators. Then the peak of a step of each model is measured, and the second one compared with
    the plan's, if there is one. Afterwards both models, their gradients and the random numbers are
    as they were before.

    Args:
        model: The model.
        planned: The model with a plan, from :func:`fxmem.apply`; or any other whose parameters
            and buffers have the same names. Its own values are not used.
        args: Positional inputs, as for :func:`fxmem.analyze`. Inputs without values are random:
            normal where they are floating, else 0 or 1.
        kwargs: Keyword inputs, of the same kinds.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
        steps: How many steps to compare.
        seed: Seed of the inputs and of the random numbers of the first step.
        optimizer: As for :func:`fxmem.analyze`; without one, parameters stay as they are.
        loss: As for :func:`fxmem.analyze`.
        autocast: ``"bf16"`` to autocast forward and loss.
        mesh: As for :func:`fxmem.analyze`: each rank, of four at most, is a process of a gloo
            group on this machine's CPU, and lays out a copy of either model. Shards of gradients
            and parameters are compared on each rank; peaks are not measured.
        parallelize: As for :func:`fxmem.analyze`; the processes must be able to import it.

    Raises:
        UsageError: An argument is not understood, or the models cannot be compared.
        TraceError: The step of the first model fails.

    >>> from torch import nn
    >>> report = verify(nn.Linear(4, 2), nn.Linear(4, 2), "8x4", optimizer="adam")
    >>> report.equal, report.steps, report.compared["gradient"]
    (True, 3, 2)
    """
    options = StepOptions(mode, steps, seed, optimizer, loss, autocast, mesh, parallelize)
    return _verify(model, planned, args, kwargs, options)


def _verify(
    model: nn.Module,
    planned: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    options: StepOptions,
    target: str | None = None,
) -> Verification:
    """Compares real steps of two models, the first of which a TARGET may name."""
    check_mode(options.mode)
    for name, value, least in (("steps", options.steps, 1), ("seed", options.seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise UsageError(f"{name} must be an integer of {least} or more, got {value!r}")
    cast_to, layout = options.cast_to, resolve_layout(options.mesh, options.parallelize, 0)
    device = _check_models(model, planned, layout)
    given = make_inputs(*gather_inputs(args, kwargs), device, options.seed)
    check_inputs(model, *given)
    task = StepTask(given, device, options)
    if layout is None:
        found, rank = _compare_here(task, model, planned), 0
    else:
        targets = (target, options.parallelize, options.loss, options.optimizer)
        found, rank = compare_ranks(task, (model, planned), layout, targets)
    plan = getattr(planned, "plan", None)
    size_hint = plan.size_hint if isinstance(plan, Plan) else None
    step = {name: getattr(options, name) for name in ("mode", "optimizer", "loss", "autocast")}
    if layout is not None:
        step |= {"mesh": options.mesh, "parallelize": options.parallelize, "rank": rank}
    step["size_hint"], notes = size_hint, [*found.notes]
    analyses = [_predict(each, given, device, step, notes) for each in (model, planned)]
    baseline, with_plan = (
        StepFigures(
            peak,
            None if analysis is None else analysis.peak_bytes,
            statistics.median(seconds) if seconds else None,
        )
        for peak, analysis, seconds in zip(found.peaks, analyses, found.times, strict=True)
    )
    promise = _find_promise(plan, analyses[0], found.peaks[1], notes)
    return Verification(
        equal=not found.differences,
        model=target or type(model).__name__,
        inputs=describe_inputs(*given),
        mode=options.mode,
        device=device.type,
        optimizer=name_choice(options.optimizer),
        loss=name_choice(options.loss),
        autocast=None if cast_to is None else strip_torch(cast_to),
        seed=options.seed,
        steps=len(found.times[0]),
        compared=dict(found.compared),
        differences=found.differences,
        baseline=baseline,
        planned=with_plan,
        notes=tuple(dict.fromkeys(notes)),
        promise=promise,
        mesh=None if layout is None else dict(layout.mesh),
        parallelize=name_choice(options.parallelize),
        rank=rank,
    )


def _predict(
    model: nn.Module,
    given: Inputs,
    device: torch.device,
    options: Mapping[str, Any],
    notes: list[str],
) -> Analysis | None:
    """Analyses the step of a model; None where it is refused, which a note then says."""
    try:
        return analyze(model, *given, device=device.type, **options)
    except FxmemError as error:
        notes.append(f"No peak is predicted: {error.cause}.")
        return None


def _compare_here(task: StepTask, model: nn.Module, planned: nn.Module) -> ComparedSteps:
    """Compares the steps of two models in this process, and measures their peaks."""
    notes: list[str] = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        prepare_targets(task.options.loss, task.options.optimizer),
    ):
        ours, theirs = Runner(task, model), Runner(task, planned)
        with keep_state(model, planned):
            found = compare_steps(ours, theirs)
        record = ours.record
        is_run = all(difference.kind is not Kind.ERROR for difference in found.differences)
        peaks = []
        for runner in (ours, theirs):
            with keep_state(model, planned):  # neither holds what the other's steps left
                peaks.append(runner.measure() if runner is ours or is_run else None)
        if found.differences and is_run:
            with keep_state(model):
                ours.prepare()
                for _ in found.times[0]:
                    ours.run()
            notes += (
                "The model is not deterministic: run again from the same state, it differs"
                f" from itself ({own.kind.value} {own.name})."
                for own in compare_records(len(found.times[0]), record, ours.record)[:1]
            )
    return replace(found, peaks=(peaks[0], peaks[1]), notes=tuple(notes))


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

    It runs on a GPU where there is one and ``device`` is None, ranks of a mesh on the CPU;
    ``options`` are other arguments of :func:`fxmem.verify`.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UsageError("there is no GPU to verify on", hint="--device cpu")
    step = StepOptions(plan.mode, **options)
    autocast = step.cast_to
    check_choices(step.loss, step.optimizer)
    with prepare_targets(target, step.loss, step.optimizer), keep_state():
        seed_random_numbers(step.seed)
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
        uses_gpu = has_gpu and step.mesh is None
        model.to(device or ("cuda" if uses_gpu else "cpu"))
        return _verify(model, planned, args, kwargs, step, target)


def _check_models(model: nn.Module, planned: nn.Module, layout: Layout | None) -> torch.device:
    """Checks that two models can be compared; returns the device that they are on."""
    check_model(model)
    check_model(planned)
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
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device.type}", hint="move it to cuda or the CPU")
    if layout is not None and device.type != "cpu":
        raise UsageError("the ranks of a mesh are verified on the CPU", hint="model.cpu()")
    return device


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

"""The canonical training or inference step, run twice on fake tensors, the second one recorded.

optimizer.zero_grad(set_to_none=True)
output = model(*inputs)            # output and loss are held by the caller to the end
loss = loss_fn(output)
loss.backward()
optimizer.step()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

import fxmem.recording.lengths  # noqa: F401 - registers what it replaces
from fxmem.graph import Category, MemoryGraph, Phase
from fxmem.lowering.functions import lower_functions
from fxmem.lowering.target import Target
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.inference import replace_inference_mode
from fxmem.recording.losses import Loss, NoGradientError
from fxmem.recording.optimizers import OptimizerFactory, answer_values, refuse_real_parameters
from fxmem.recording.randomness import watch_random_state
from fxmem.recording.recorder import Recorder
from fxmem.recording.residents import (
    allocate_model,
    iterate_held,
    label_gradients,
    label_residents,
)
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.forward_state import ForwardState
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.leaves import is_leaf
from fxmem.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Step:
    """What to run.

    Attributes:
        model: On fake tensors, in train or eval mode.
        args: Positional inputs, on fake tensors.
        kwargs: Keyword inputs.
        train: Whether loss, backward and the optimizer run; else under ``no_grad``.
        inference_mode: Whether it is under ``inference_mode`` instead.
        loss: From the model's output to the loss.
        make_optimizer: From the parameters to the optimizer; None for none.
        accumulate: How many micro-batches add up their gradients before the optimizer runs.
        set_to_none: Whether gradients are freed before the step; else they are zeroed in place.
        autocast: What forward and loss are autocast to, or None; float16 takes a gradient scaler.
        holds_previous: Whether output and loss of the step before live until this one's take
            their names, as in a training loop without a function around its body.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool
    loss: Loss
    make_optimizer: OptimizerFactory | None
    accumulate: int = 1
    set_to_none: bool = True
    autocast: torch.dtype | None = None
    holds_previous: bool = False
    inference_mode: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step.

    Attributes:
        graph: The memory graph.
        fx_graph: The traced FX graph; it can be run where ``reason`` is empty.
        reason: What the FX graph cannot express.
        live_bytes: The live bytes after each allocation and free, as they were watched; the
            timeline computed from ``graph`` must say the same.
        notes: What to know about how the step was run.
        casts_weights: Whether autocast casts weights, whose casts are kept under ``no_grad`` and
            not under ``inference_mode``.
    """

    graph: MemoryGraph
    fx_graph: fx.Graph
    reason: str
    live_bytes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    casts_weights: bool = False


def record_step(
    step: Step,
    target: Target,
    *,
    symbolic_sizes: bool = True,
    size_hint: int | None = None,
) -> Recording:
    """Runs a step twice and records the second time, the steady state.

    Must be called with the step's fake mode active.

    Args:
        step: What to run.
        target: The device whose kernels run the step.
        symbolic_sizes: See :class:`fxmem.tracing.tracer.Tracer`.
        size_hint: See :class:`fxmem.recording.recorder.Recorder`.
    """
    recorder = Recorder(target, size_hint)
    with (
        _no_garbage_collection(),
        watch_random_state(recorder),
        recorder.casts.watch_exits(),
        lower_functions(target) as notes,
        refuse_real_parameters(),
        replace_inference_mode(),
        _restore_gradients(recorder),
    ):
        try:
            recording = _StepRunner(step, target, recorder).run(symbolic_sizes)
            return replace(recording, notes=(*recording.notes, *notes))
        except NoGradientError as error:
            if not recorder.runner.draws:
                raise
            raise NoGradientError(
                " ".join((f"{error.cause}.", *_note_draws(recorder))).removesuffix("."),
                hint="below a probability of 0.5, what is dropped at random is there",
            ) from error


def _note_draws(recorder: Recorder) -> Iterator[str]:
    for source in recorder.runner.draws:
        at = f" at {source}" if source else ""
        yield f"A random draw decides{at}: taken as 0.5."


def _explain_randomness(recorder: Recorder) -> str:
    """Why no graph can be replayed whose way was drawn, or that leaves seeds out."""
    if recorder.runner.draws:
        return "a random draw decides which way it goes"
    for source in recorder.seeding:
        return f"it sets the state of the random numbers{f' at {source}' if source else ''}"
    return ""


class _StepRunner:
    """One step in the making; its parts are functions, so that locals live as in eager."""

    def __init__(self, step: Step, target: Target, recorder: Recorder) -> None:
        self._step = step
        self._device_type = target.name
        is_scaled = step.train and step.autocast is torch.float16
        self._scaler = target.make_scaler() if is_scaled and target.make_scaler else None
        self._recorder = recorder
        self._target: Any = None
        self._previous: tuple[Any, Any] = None, None
        self._first_change = ""
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        self._optimizer = step.make_optimizer(parameters) if step.make_optimizer else None
        for _, value in iterate_held(step.model):
            if isinstance(value, torch.optim.Optimizer):  # hooks step it in backward
                answer_values(value)

    def run(self, symbolic_sizes: bool) -> Recording:
        step, recorder = self._step, self._recorder
        with recorder:
            allocate_model(recorder, step.model)
            self._label_residents()
            self._run_once(self._run_first_model, self._run_loss)
            # What the first step left in reference cycles is gone in a steady run, sooner or
            # later; all of it is in the youngest generation.
            gc.collect(0)
            self._zero_grad()
            self._label_residents()
            tracer = Tracer(step.model, recorder, symbolic_sizes=symbolic_sizes)
            recorder.begin_step()
            self._run_once(
                lambda: tracer.run_model(step.args, step.kwargs),
                lambda output: tracer.run_loss(self._run_loss, output),
            )
        graph = assemble_graph(recorder, tracer.nodes, tracer.calls)
        return Recording(
            graph,
            tracer.graph,
            tracer.reason or self._first_change or _explain_randomness(recorder),
            tuple(recorder.ledger.live_bytes),
            tuple(_note_draws(recorder)),
            recorder.casts.casts_weights,
        )

    def _run_once(self, run_model: Callable[[], Any], run_loss: Callable[[Any], Any]) -> None:
        """One step; output and loss live to its end, and the recording ends before they go."""
        recorder = self._recorder
        recorder.set_phase(Phase.FORWARD)
        output, loss = self._previous
        self._previous = None, None
        if not self._step.train:
            with self._without_grad(), self._autocast():
                output = run_model()
            recorder.label(output, Category.OUTPUT, "output")
            recorder.end_step()
            self._keep(output, None)
            return
        if self._step.accumulate > 1:
            # Those after the second do what the second does.
            with self._autocast():
                output = self._run_model()
                loss = self._run_loss(output)
            self._run_backward(loss)
            recorder.set_phase(Phase.FORWARD)
        with recorder.watch_saved(), self._autocast():
            output = run_model()
            recorder.label(output, Category.OUTPUT, "output")
            recorder.set_phase(Phase.LOSS)
            loss = run_loss(output)
        self._run_backward(loss)
        recorder.set_phase(Phase.OPTIMIZER)
        self._run_optimizer()
        recorder.end_step()
        self._keep(output, loss)

    def _run_first_model(self) -> Any:
        state = ForwardState(self._step.model, is_leaf, is_first=True)
        output = self._run_model()
        self._first_change = state.find_change()
        return output

    def _run_model(self) -> Any:
        return self._step.model(*self._step.args, **self._step.kwargs)

    def _run_loss(self, output: Any) -> Any:
        if self._target is None and self._step.loss.make_target is not None:
            self._target = self._step.loss.make_target(output)
        return self._step.loss.compute(output, self._target)

    def _run_backward(self, loss: Any) -> None:
        self._recorder.label(loss, Category.OUTPUT, "loss")
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        self._recorder.set_phase(Phase.BACKWARD)
        scaled.backward()
        label_gradients(self._recorder, self._step.model, self._named_inputs())

    def _run_optimizer(self) -> None:
        if self._optimizer is None:
            return
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _without_grad(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode() if self._step.inference_mode else torch.no_grad()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._step.autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=dtype)

    def _keep(self, output: Any, loss: Any) -> None:
        if self._step.holds_previous:
            self._previous = output, loss

    def _zero_grad(self) -> None:
        holder = self._optimizer if self._optimizer is not None else self._step.model
        holder.zero_grad(set_to_none=self._step.set_to_none)
        for tensor in iterate_tensors((self._step.args, self._step.kwargs)):
            tensor.grad = None  # each step has a batch of its own

    def _label_residents(self) -> None:
        label_residents(
            self._recorder,
            self._step.model,
            self._named_inputs(),
            target=self._target,
            loss=self._step.loss.function,
            optimizer=self._optimizer,
            scaler_state=None if self._scaler is None else self._scaler.state_tensors,
        )

    def _named_inputs(self) -> Iterator[tuple[str, Any]]:
        return bind_arguments(self._step.model, self._step.args, self._step.kwargs)


@contextlib.contextmanager
def _restore_gradients(recorder: Recorder) -> Iterator[None]:
    """Leaves the user's own parameters without what backward has put there."""
    try:
        yield
    finally:
        recorder.strangers.restore_gradients()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reference cycles die at no other moment than the end of a step.

    When the collector would run is chance; without it a recording is the same every time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""A training or inference step, run twice on fake tensors, the second one recorded.

In the plain loop (:class:`fxmem.loop.Loop` says what others do)::

    optimizer.zero_grad(set_to_none=True)
    output = model(*inputs)  # output and loss are held by the caller to the end
    loss = loss_fn(output)
    loss.backward()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from fxmem.graph import Category, MemoryGraph, Phase
from fxmem.kernels.functions import lower_functions
from fxmem.kernels.registry import Target
from fxmem.loop import PLAIN, Loop
from fxmem.parallelism.layout import Mesh
from fxmem.parallelism.reducer import has_reducers
from fxmem.parallelism.wrapping import keep_gradients_local
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.counts import assume_counts
from fxmem.recording.isolation import replace_inference_mode, watch_random_state
from fxmem.recording.losses import Loss, NoGradientError
from fxmem.recording.optimizers import OptimizerFactory, answer_values
from fxmem.recording.recorder import Recorder
from fxmem.recording.residents import (
    allocate_model,
    iterate_held,
    label_gradients,
    label_residents,
)
from fxmem.recording.size_hints import SizeHints
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.compiled import leave_out_compiler
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.state import ForwardState
from fxmem.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Step:
    """A step to run."""

    model: nn.Module  # on fake tensors, in train or eval mode
    args: tuple[Any, ...]  # on fake tensors
    kwargs: Mapping[str, Any]
    train: bool  # loss, backward and the optimizer run; else forward under no_grad
    loss: Loss
    make_optimizer: OptimizerFactory | None  # from the parameters
    loop: Loop = PLAIN  # around the model
    autocast: torch.dtype | None = None  # of forward and loss; float16 takes a gradient scaler
    inference_mode: bool = False  # inference runs under inference_mode, not no_grad
    # lays the model out on a mesh of processes; None for one process
    parallelize: Callable[[nn.Module], nn.Module] | None = None
    mesh: Mesh = ()
    # empties what the model has let go of since the step before
    forget_replaced: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step."""

    graph: MemoryGraph  # the memory graph
    fx_graph: fx.Graph  # the traced FX graph, which can be run where ``reason`` is empty
    reason: str  # why the FX graph cannot express the step
    # live bytes after each allocation and free as they were watched, equal to those of the
    # timeline that is computed from ``graph``
    live_bytes: tuple[int, ...]
    notes: tuple[str, ...] = ()  # notes on how the step was run, a sentence each
    # whether autocast casts weights: casts are kept under ``no_grad`` alone
    casts_weights: bool = False
    is_routed: bool = False  # whether the assumed routing of tokens to experts decides anything


def record_step(
    step: Step, target: Target, *, symbolic_sizes: bool = True, hints: SizeHints | None = None
) -> Recording:
    """Runs a step twice and records the second time, the steady state.

    Must be called with the step's fake mode active.

    Args:
        step: The step.
        target: The device whose kernels run it.
        symbolic_sizes: Whether sizes stay nodes (``fx``), or are numbers (``record``).
        hints: How many elements ``nonzero`` and the like find; None to refuse them.
    """
    recorder = Recorder(target, hints, step.mesh)
    with imitate_target(recorder, target) as notes:
        try:
            recording = _StepRunner(step, target, recorder).run(symbolic_sizes)
            return replace(
                recording,
                notes=(*note_assumptions(recorder), *notes),
                is_routed=bool(recorder.runner.routings),
            )
        except NoGradientError as error:
            if not recorder.runner.draws:
                raise
            raise NoGradientError(
                " ".join((f"{error.cause}.", *_note_draws(recorder))).removesuffix("."),
                hint="a layer that is dropped with a probability below 0.5 is kept",
            ) from error
        finally:
            recorder.real_tensors.restore_gradients()


def trace_forward(
    step: Step, target: Target, *, hints: SizeHints | None = None
) -> tuple[fx.Graph, str]:
    """Traces the forward of a step, once, and records nothing; arguments as for `record_step`.

    Returns:
        The FX graph, and what it cannot express.
    """
    recorder = Recorder(target, hints)
    with imitate_target(recorder, target):
        return _StepRunner(step, target, recorder).trace()


@contextlib.contextmanager
def imitate_target(recorder: Recorder, target: Target) -> Iterator[Mapping[str, None]]:
    """Runs PyTorch as on the target, and yields notes on what runs otherwise."""
    with (
        watch_random_state(recorder),
        recorder.watch_resizing(),
        recorder.casts.watch_exits(),
        lower_functions(target) as notes,
        leave_out_compiler(recorder.notes),
        assume_counts(recorder.runner.hints, recorder.notes),
        replace_inference_mode(),
    ):
        yield notes


def note_assumptions(recorder: Recorder) -> Iterator[str]:
    """Notes what a step was taken to do where values decide, a sentence each."""
    yield from recorder.notes
    yield from _note_draws(recorder)
    routings = recorder.runner.routings
    searches = [str(source) for source, searches in routings.items() if source and searches]
    if routings:
        lines = searches or [str(source) for source in routings if source]
        way = f" (--size-hint {searches[-1]}=N for another size)" if searches else ""
        at = f" at {', '.join(lines)}" if lines else ""
        yield f"The routing of tokens decides{at}: taken as even over the experts{way}."


def _note_draws(recorder: Recorder) -> Iterator[str]:
    for source in recorder.runner.draws:
        at = f" at {source}" if source else ""
        yield f"A random draw decides{at}: taken as 0.5."


def _explain_randomness(recorder: Recorder) -> str:
    if recorder.runner.draws:
        return "a random draw decides which way it goes"
    for source in recorder.seeding:
        return f"it sets the state of the random numbers{f' at {source}' if source else ''}"
    return ""


_Trace: TypeAlias = Callable[[Callable[[Any], Any], Any], Any]
"""Runs a function of the model's output, and traces it."""


def _call(compute: Callable[[Any], Any], output: Any) -> Any:
    return compute(output)


def lay_out(step: Step, recorder: Recorder) -> Step:
    """Lays a step's model out on the mesh of processes, if there is one."""
    if step.parallelize is None:
        return step
    with recorder:
        model = step.parallelize(step.model)
    recorder.ledger.forget_freed()
    return replace(step, model=model)


class _StepRunner:
    """Runs a step, in functions whose locals live as long as in an eager loop."""

    def __init__(self, step: Step, target: Target, recorder: Recorder) -> None:
        self._step = step = lay_out(step, recorder)
        self._device_type = target.name
        is_scaled = step.train and step.autocast is torch.float16
        self._scaler = target.make_scaler() if is_scaled and target.make_scaler else None
        self._recorder = recorder
        self._target: Any = None
        self._output: Any = None  # the names of the training loop
        self._loss: Any = None
        self._last_loss: Any = None
        self._norm: Any = None
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        self._optimizer = step.make_optimizer(parameters) if step.make_optimizer else None
        for _, value in iterate_held(step.model):
            if isinstance(value, torch.optim.Optimizer):  # hooks step it in backward
                answer_values(value)

    def run(self, symbolic_sizes: bool) -> Recording:
        """Runs the step twice, and describes the second time."""
        step, recorder, loop = self._step, self._recorder, self._step.loop
        first_change = ""

        def run_first_model() -> Any:
            nonlocal first_change
            if step.parallelize is not None:
                return self._run_model()
            state = ForwardState(step.model, is_first=True)
            output = self._run_model()
            first_change = state.find_change()
            return output

        with recorder:
            allocate_model(recorder, step.model)
            self._label_residents()
            others, total = [], None
            if loop.prefetch and step.train:  # the inputs of the later micro-batches
                others = [
                    torch.empty_like(tensor, requires_grad=False)
                    for _ in range(loop.accumulate - 1)
                    for tensor in iterate_tensors((step.args, step.kwargs))
                ]
                recorder.label(others, Category.INPUT, "other micro-batches")
            parameter = next(step.model.parameters(), None)
            if loop.keep_log and step.train and parameter is not None:
                total = parameter.detach().new_zeros((), dtype=torch.float32)
                recorder.label(total, Category.OUTPUT, "sum of losses")
            del parameter
            self._run_once(run_first_model, _call)
            if has_reducers():
                self._run_once(run_first_model, _call)
            step.forget_replaced()
            # Reference cycles of the first step are gone in a steady run, sooner or later; all of
            # them are in the youngest generation.
            gc.collect(0)
            if loop.zero_grad == "before forward":
                self._zero_grad()
            for tensor in iterate_tensors((step.args, step.kwargs)):
                tensor.grad = None  # each step has a batch of its own
            self._label_residents()
            tracer = Tracer(
                step.model,
                recorder,
                symbolic_sizes=symbolic_sizes,
                builds_graph=step.parallelize is None,
            )
            recorder.begin_step()
            self._run_once(lambda: tracer.run_model(step.args, step.kwargs), tracer.run_loss)
            del others, total
        return Recording(
            assemble_graph(recorder, tracer.nodes, tracer.calls),
            tracer.graph,
            tracer.reason or first_change or _explain_randomness(recorder),
            tuple(recorder.ledger.live_bytes),
            casts_weights=recorder.casts.casts_weights,
        )

    def trace(self) -> tuple[fx.Graph, str]:
        """Traces one forward."""
        step, recorder = self._step, self._recorder
        tracer = Tracer(step.model, recorder, symbolic_sizes=True)
        with recorder:
            allocate_model(recorder, step.model)
            self._label_residents()
            recorder.begin_step()
            recorder.set_phase(Phase.FORWARD)
            grad = contextlib.nullcontext() if step.train else self._without_grad()
            with grad, self._autocast():
                tracer.run_model(step.args, step.kwargs)
        return tracer.graph, tracer.reason or _explain_randomness(recorder)

    def _run_once(self, run_model: Callable[[], Any], trace: _Trace) -> None:
        """Runs one step; the recording ends before the caller's names are released."""
        recorder, loop, optimizer = self._recorder, self._step.loop, self._optimizer
        recorder.set_phase(Phase.FORWARD)
        if not self._step.train:
            with self._without_grad(), self._autocast():
                self._output = run_model()
            recorder.label(self._output, Category.OUTPUT, "output")
        else:
            if loop.accumulate > 1:
                # Micro-batches after the second do what the second does.
                model = None if loop.reduce_each else self._step.model
                with keep_gradients_local(model):
                    self._run_forward(self._run_model, _call)
                    self._run_backward(is_first=True)
                recorder.set_phase(Phase.FORWARD)
            with recorder.watch_saved():
                self._run_forward(run_model, trace)
            self._run_backward(is_first=loop.accumulate == 1)
            recorder.set_phase(Phase.OPTIMIZER)
            if loop.clip_grad:
                if self._scaler is not None and optimizer is not None:
                    self._scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(self._step.model.parameters(), 1.0)
                recorder.label(norm, Category.OUTPUT, "norm of gradients")
                self._norm = norm if loop.keep_log else None
                del norm
            if optimizer is not None and self._scaler is not None:
                self._scaler.step(optimizer)
                self._scaler.update()
            elif optimizer is not None:
                optimizer.step()
        recorder.end_step()
        if loop.outputs != "next step":
            self._output = self._loss = None

    def _run_forward(self, run_model: Callable[[], Any], trace: _Trace) -> None:
        recorder, loop = self._recorder, self._step.loop
        with self._autocast():
            self._output = run_model()
            recorder.label(self._output, Category.OUTPUT, "output")
            recorder.set_phase(Phase.LOSS)
            if loop.autocast_loss:
                self._compute_loss(trace, is_cast=loop.float_outputs)
        if not loop.autocast_loss:
            is_cast = loop.float_outputs or self._step.autocast is not None
            self._compute_loss(trace, is_cast=is_cast)
        if loop.outputs == "loss":
            self._output = None

    def _compute_loss(self, trace: _Trace, *, is_cast: bool) -> None:
        if is_cast:
            self._output = trace(cast_to_float32, self._output)
            self._recorder.label(self._output, Category.OUTPUT, "output")
        self._loss = trace(self._run_loss, self._output)

    def _run_model(self) -> Any:
        return self._step.model(*self._step.args, **self._step.kwargs)

    def _run_loss(self, output: Any) -> Any:
        if self._target is None and self._step.loss.make_target is not None:
            self._target = self._step.loss.make_target(output)
        return self._step.loss.compute(output, self._target)

    def _run_backward(self, *, is_first: bool) -> None:
        loop, loss = self._step.loop, self._loss
        self._recorder.label(loss, Category.OUTPUT, "loss")
        if is_first and loop.zero_grad == "before backward":
            self._zero_grad()
        divided = loss / loop.accumulate if loop.keep_log else loss
        scaled = divided if self._scaler is None else self._scaler.scale(divided)
        self._recorder.set_phase(Phase.BACKWARD)
        scaled.backward(retain_graph=loop.retain_graph)
        if loop.detach_loss:
            self._loss, self._last_loss = None, loss.detach()
        label_gradients(self._recorder, self._step.model, self._named_inputs())

    def _without_grad(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode() if self._step.inference_mode else torch.no_grad()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._step.autocast
        if dtype is None:
            return contextlib.nullcontext()
        cache = self._step.loop.autocast_cache
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=cache)

    def _zero_grad(self) -> None:
        holder = self._optimizer if self._optimizer is not None else self._step.model
        holder.zero_grad(set_to_none=self._step.loop.set_to_none)

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


def cast_to_float32(output: Any) -> Any:
    """Casts the tensors of half precision in a model's output to float32.

    Source: ``convert_to_fp32`` in accelerate's ``utils/operations.py``, which walks lists,
    tuples and mappings; ``convert_output`` in Lightning's ``fabric/plugins/precision``.

    >>> cast_to_float32({"x": (torch.zeros(2, dtype=torch.bfloat16), 3)})
    {'x': (tensor([0., 0.]), 3)}
    """
    if isinstance(output, Mapping):
        made = {name: cast_to_float32(value) for name, value in output.items()}
        return type(output)(made)  # type: ignore[call-arg]
    if isinstance(output, tuple | list):
        parts = (cast_to_float32(value) for value in output)
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    is_half = isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    return output.float() if is_half else output

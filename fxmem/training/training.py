"""A training that a loop drives: every step warms up but the last, which is recorded.

The loop is plain Python around the model (:mod:`fxmem.training.loops`, or the caller's). It is
not told of the recording: a step begins with its first operator, the phase follows from the calls
of the model and of autograd's engine, and values live as long as the loop's own names hold them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from fxmem.compiling.compiler import Compilation
from fxmem.errors import TraceError
from fxmem.fakes.containers import iterate_tensors
from fxmem.graph import Category, Phase
from fxmem.kernels.registry import Backend
from fxmem.parallelism.collectives import has_reducers
from fxmem.parallelism.layout import Mesh
from fxmem.recording.autograd import watch_engine
from fxmem.recording.recorder import Recorder
from fxmem.recording.saves import watch_saved
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.state import ForwardState
from fxmem.tracing.tracer import Tracer
from fxmem.training.failures import mark_traced
from fxmem.training.losses import Loss
from fxmem.training.optimizers import OptimizerFactory, answer_values
from fxmem.training.residents import (
    NamedInputs,
    allocate_model,
    iterate_held,
    label_gradients,
    label_residents,
    label_states,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of a step."""

    model: nn.Module  # on fake tensors, in train or eval mode
    args: tuple[Any, ...]  # on fake tensors
    kwargs: Mapping[str, Any]
    train: bool  # loss, backward and the optimizer run; else forward without gradients
    loss: Loss
    make_optimizer: OptimizerFactory | None  # from the parameters
    loop: Callable[[Training], None]  # around the model
    autocast: torch.dtype | None = None  # of forward and loss; float16 takes a gradient scaler
    inference_mode: bool = False  # inference runs under inference_mode, not no_grad
    # lays the model out on a mesh of processes; None for one process
    parallelize: Callable[[nn.Module], nn.Module] | None = None
    mesh: Mesh = ()
    compilation: Compilation | None = None  # None where torch.compile is left out
    # empties what the model has let go of since the step before
    forget_replaced: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch, and its place in the step."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_first: bool
    is_last: bool


class Training:
    """A training that a loop drives.

    Attributes:
        model: The model, which the loop calls with the arguments of a batch.
        optimizer: The optimizer. Without one, what stands for it frees gradients and steps
            nothing.
        scaler: The gradient scaler of float16; without autocast to it, one that scales nothing.
        is_autocast: Whether autocast is asked for.
    """

    def __init__(self, step: Step, target: Backend, recorder: Recorder, tracer: Tracer) -> None:
        self.model = step.model
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        self.optimizer: Any = _NoOptimizer(step.model)
        if step.make_optimizer is not None:
            self.optimizer = step.make_optimizer(parameters)
        self.scaler: Any = torch.amp.GradScaler(enabled=False)
        if step.train and step.autocast is torch.float16 and target.make_scaler:
            made = target.make_scaler()
            self.scaler = made if step.make_optimizer else _ScaleOnly(made)
        self.is_autocast = step.autocast is not None
        self._step = step
        self._device_type = target.name
        self._recorder = recorder
        self._tracer = tracer
        self._target: Any = None  # of a named loss
        self._stepped: dict[int, Any] = {}  # optimizers, by their ids
        self._first_change = ""
        self._warmed_up = 0
        self._is_last = False  # the last micro-batch of a step runs
        self._traces = False  # and its nodes are wanted
        self._is_called = False  # the model was, since the step began
        self._is_inside = False  # the model, the loss or backward runs
        self._zero_grad = self.optimizer.zero_grad
        self.optimizer.zero_grad = self._run_zero_grad
        for _, value in iterate_held(step.model):
            if isinstance(value, torch.optim.Optimizer):  # hooks step it in backward
                answer_values(value)

    # -- for loops -------------------------------------------------------------------------------

    def batches(self, accumulate: int = 1) -> Iterator[Batch]:
        """Yields the micro-batches of all steps; the body of the loop is a micro-batch.

        Args:
            accumulate: Micro-batches of a step. Those between the first and the last do what the
                last does, and are left out.
        """
        step, recorder, count = self._step, self._recorder, min(accumulate, 2)
        steps = 2
        while self._warmed_up < steps:
            is_recorded = self._warmed_up == steps - 1
            if is_recorded:
                recorder.before_first = self._begin_step
            for index in range(count):
                is_last = index == count - 1
                self._is_called = self._is_called and index > 0
                with contextlib.ExitStack() as stack:
                    if is_recorded and is_last and step.train:
                        stack.enter_context(watch_saved(recorder))
                    self._is_last, self._traces = is_last, is_recorded and is_last
                    self._recorder.set_phase(Phase.FORWARD)
                    self._tracer.set_phase(None)
                    yield Batch(step.args, step.kwargs, index == 0, is_last)
            recorder.end_step()
            self._warmed_up += 1
            if self._warmed_up == 1 and has_reducers():
                steps = 3  # which lay their buckets out anew in the second

    def loss(self, output: Any) -> Tensor:
        """Computes the loss that the caller chose."""
        self._is_inside = True
        try:
            if self._target is None and self._step.loss.make_target is not None:
                self._target = self._step.loss.make_target(output)
            loss = self._step.loss.compute(output, self._target)
        finally:
            self._is_inside = False
        return self.hold("loss", loss)

    def autocast(self, cache_enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Makes the autocast that the caller chose, or a context that does nothing."""
        dtype = self._step.autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=cache_enabled)

    def without_grad(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the context in which inference runs."""
        return torch.inference_mode() if self._step.inference_mode else torch.no_grad()

    @contextlib.contextmanager
    def no_sync(self, batch: Batch, *, reduce_each: bool = False) -> Iterator[None]:
        """Makes a context in which ranks reduce no gradients but those of the last micro-batch."""
        model: Any = None if batch.is_last or reduce_each else self.model
        if hasattr(model, "no_sync"):  # DistributedDataParallel
            with model.no_sync():
                yield
        elif hasattr(model, "set_requires_gradient_sync"):  # fully_shard, replicate
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        else:
            yield

    def hold(self, name: str, value: _T) -> _T:
        """Names a value that the loop holds, and returns it."""
        self._recorder.label(value, Category.OUTPUT, name)
        return value

    def make_inputs(self, count: int) -> list[Tensor]:
        """Makes as many tensors again as the inputs have, for later micro-batches."""
        made = [
            torch.empty_like(tensor, requires_grad=False)
            for _ in range(count)
            for tensor in iterate_tensors((self._step.args, self._step.kwargs))
        ]
        self._recorder.label(made, Category.INPUT, "other micro-batches")
        return made

    def make_scalar(self) -> Tensor | None:
        """Makes a scalar beside the parameters."""
        parameter = next(self.model.parameters(), None)
        return None if parameter is None else parameter.detach().new_zeros((), dtype=torch.float32)

    # -- the recording ---------------------------------------------------------------------------

    def run_loop(self) -> str:
        """Runs the loop; returns why the model's graph cannot express the step, if so.

        Raises:
            TraceError: The loop ended before a step was recorded.
        """
        allocate_model(self._recorder, self.model)
        self._label_residents()
        watching = watch_engine(self._begin_backward, self._run_engine)
        # The loop may make optimizers of its own.
        handle = register_optimizer_step_post_hook(self._see_optimizer)
        with self._tracer.trace(self._watch_model), watching:
            try:
                self._step.loop(self)
            except Exception as error:
                if self._traces:
                    mark_traced(error)
                raise
            finally:  # cycles would keep the inputs
                handle.remove()
                self.optimizer.zero_grad = self._zero_grad
                self._recorder.before_first = None
        if not self._recorder.operations:
            raise TraceError(
                "the loop ended before its second step",
                hint="iterate over training.batches() to the end",
            )
        return self._first_change

    def trace_forward(self) -> None:
        """Runs the model once, and traces its nodes."""
        recorder, step = self._recorder, self._step
        allocate_model(recorder, self.model)
        self._label_residents()
        recorder.begin_step()
        self._traces = True
        grad = contextlib.nullcontext() if step.train else self.without_grad()
        with self._tracer.trace(self._watch_model), grad, self.autocast():
            self.model(*step.args, **step.kwargs)

    def _begin_step(self) -> None:
        self._recorder.before_first = None
        self._step.forget_replaced()
        # Reference cycles of the first step are gone in a steady run, sooner or later; all of them
        # are in the youngest generation.
        gc.collect(0)
        for tensor in iterate_tensors((self._step.args, self._step.kwargs)):
            tensor.grad = None  # each step has a batch of its own
        self._label_residents()
        self._recorder.begin_step()

    def _run_zero_grad(self, set_to_none: bool = True) -> None:
        with self._tracer.be_silent():
            self._zero_grad(set_to_none)
        is_recorded = self._recorder.ledger.recording or self._recorder.before_first is not None
        if is_recorded and not self._is_called:  # the step begins after it
            self._recorder.before_first = self._begin_step

    def _set_phase(self, phase: Phase) -> None:
        self._recorder.set_phase(phase)
        is_traced = self._traces and phase in (Phase.FORWARD, Phase.LOSS)
        self._tracer.set_phase(phase if is_traced else None)

    @contextlib.contextmanager
    def _watch_model(self, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Watches a call of the model, which runs within, and yields what takes the result."""
        recorder = self._recorder
        if self._is_inside:
            yield lambda output: None
            return
        if recorder.before_first is not None:
            recorder.before_first()
        self._is_called = True
        self._set_phase(Phase.FORWARD)
        watching = self._tracer.trace_model(args, kwargs) if self._traces else self._warm_up()

        def end(output: Any) -> None:
            see_output(output)
            recorder.label(output, Category.OUTPUT, "output")
            self._set_phase(Phase.LOSS if self._step.train else Phase.FORWARD)

        self._is_inside = True
        try:
            with watching as see_output:
                yield end
        finally:
            self._is_inside = False

    @contextlib.contextmanager
    def _warm_up(self) -> Iterator[Callable[[Any], None]]:
        """Sees what the model's first call changes."""
        if self._step.parallelize is not None or self._warmed_up:
            yield lambda output: None
            return
        state = ForwardState(self.model, is_first=True)

        def end(_output: Any) -> None:
            self._first_change = self._first_change or state.find_change()

        yield end

    def _begin_backward(self, losses: Any) -> None:
        if not self._is_inside:
            self._recorder.label(tree_leaves(losses), Category.OUTPUT, "loss")
            self._set_phase(Phase.BACKWARD)

    def _run_engine(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Takes the place of autograd's engine."""
        if self._is_inside:
            return run(*args, **kwargs)
        self._is_inside = True
        try:
            result = run(*args, **kwargs)
        finally:
            self._is_inside = False
        if kwargs.get("accumulate_grad"):
            label_gradients(self._recorder, self.model, self._named_inputs())
            self._set_phase(Phase.OPTIMIZER if self._is_last else Phase.BACKWARD)
        else:
            self._set_phase(Phase.LOSS)  # of gradients themselves, as a penalty's
        return result

    def _see_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._stepped[id(optimizer)] = optimizer

    def _label_residents(self) -> None:
        for optimizer in self._stepped.values():
            label_states(self._recorder, self.model, optimizer)
        label_residents(
            self._recorder,
            self.model,
            self._named_inputs(),
            target=self._target,
            loss=self._step.loss.function,
            optimizer=None if self._step.make_optimizer is None else self.optimizer,
            scaler_state=getattr(self.scaler, "state_tensors", None),
        )

    def _named_inputs(self) -> NamedInputs:
        return bind_arguments(self._step.model, self._step.args, self._step.kwargs)


class _NoOptimizer:
    """Frees the gradients of a model, and steps nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.zero_grad = model.zero_grad

    def step(self) -> None:
        pass


class _ScaleOnly:
    """Scales losses of a model that no optimizer trains."""

    def __init__(self, scaler: Any) -> None:
        self.scale = scaler.scale
        self._scaler = scaler

    @property
    def state_tensors(self) -> Any:
        return self._scaler.state_tensors

    def unscale_(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        pass

    def update(self) -> None:
        pass

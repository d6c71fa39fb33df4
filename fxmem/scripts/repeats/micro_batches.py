"""Micro-batches of a script that repeat: after two that were recorded alike, others are copied.

Scripts that accumulate gradients call the same model dozens of times before the optimizer steps.
The first call makes the gradients; the next ones differ in nothing but their place. A model's
forward, and its part of backward, are segments of the recording: once the second of two equals the
first one moved, calls in the same state are copied. The script's own code, its loss and its loader
run each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import TreeSpec, tree_unflatten

from fxmem.errors import TraceError
from fxmem.graph import Phase
from fxmem.recording.recorder import Recorder
from fxmem.recording.segments import (
    Mark,
    Places,
    Segment,
    insert_segment,
    move_segment,
    read_mark,
    read_segment,
)
from fxmem.scripts.repeats.call_state import read_generators, read_state
from fxmem.scripts.repeats.carried import list_carried
from fxmem.scripts.repeats.evaluations import Evaluations
from fxmem.scripts.repeats.model_calls import (
    ModelCall,
    Output,
    answer_call,
    are_own,
    begin_call,
    find_casts,
    find_places,
    have_effects,
    list_freed,
    make_outputs,
    move_outputs,
    read_outputs,
)
from fxmem.tracing.nodes import NodeLog

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_ANOTHER_FUNCTION = 1 << 40
"""Added to the numbers of autograd's functions, so that a copy has functions of its own."""


@dataclass(slots=True)
class _Backward:
    """The part of backward that belongs to a call of a model."""

    call: ModelCall
    last_function: int
    entry: int | None = None  # the function of autograd at which backward enters the model
    gradient: int | None = None
    start: Mark | None = None
    hooks: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One call of a model and its part of backward."""

    forward: Segment
    backward: Segment
    function: int
    inputs: tuple[int, ...]
    origins: tuple[int, ...]
    outputs: tuple[Any, ...]
    structure: TreeSpec
    gradient: int
    casts: tuple[int, ...]  # that autocast keeps until it exits
    held: tuple[int, ...]  # of these, by nothing else


class MicroBatches:
    """Leaves out calls of models that would be recorded like the calls before.

    Args:
        recorder: Records the operators.
        read_log: Returns the log of the nodes of this window.
        be_silent: Makes no nodes of what runs within.
    """

    def __init__(
        self,
        recorder: Recorder,
        read_log: Callable[[], NodeLog],
        be_silent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._recorder = recorder
        self._read_log = read_log
        self._be_silent = be_silent
        self._evaluations = Evaluations(recorder, read_log)
        self._copies = 0
        self.forget()

    def forget(self) -> None:
        """Forgets all calls, as a window ends."""
        self._evaluations.forget()
        self._calls: list[_Backward] = []
        self._known: MicroBatch | None = None
        self._state: Any = None
        self._is_proved = False
        self._window = object()

    def call(self, run: Callable[[], Any], module: nn.Module, arguments: Any) -> Any:
        """Calls a model, or answers as it would."""
        recorder, log = self._recorder, self._read_log()
        if torch.distributed.is_initialized() or _collects(module):
            return run()
        call = begin_call(recorder, log, module, arguments)
        if not torch.is_grad_enabled():
            answer = self._evaluations.answer(call, arguments)
            if answer is not None:
                return answer[0]
        elif self._known is not None and self._is_proved and call.state == self._state:
            with recorder.ledger.lock:  # a thread of the script may make a batch meanwhile
                return self._answer(self._known, call)
        drawn = read_generators()
        result = run()
        call.stop, last_function = read_mark(recorder, log), _get_sequence_nr()
        tensors: list[Tensor | None] = []
        with torch._C.DisableTorchFunction():
            if drawn == read_generators() and call.state == read_state(module, arguments):
                given = list_carried(arguments)
                tensors, call.outputs, call.structure = read_outputs(recorder, log, result, given)
        call.tensors = []  # which the caller may free
        if torch.is_grad_enabled():
            self._calls.append(self._watch_gradients(_Backward(call, last_function), tensors))
        else:
            self._evaluations.see_result(call, arguments)
        return result

    def begin_backward(self, losses: Iterable[Any]) -> None:
        """Finds where backward enters the model that was called."""
        if len(self._calls) != 1:
            return
        (backward,), entries, seen = self._calls, set(), set()
        left = [loss.grad_fn for loss in losses if isinstance(loss, Tensor)]
        while left:
            function = left.pop()
            if function is None or function in seen or function.name() == _ACCUMULATE:
                continue
            seen.add(function)
            number = function._sequence_nr()
            if backward.call.function <= number < backward.last_function:
                entries.add(number)
            else:
                left += [following for following, _ in function.next_functions]
        backward.entry = entries.pop() if len(entries) == 1 else None

    def end_backward(self) -> None:
        """Compares the call whose backward has run with the one before."""
        if not self._calls:
            return
        (backward, *others), self._calls = self._calls, []
        state = backward.call.state
        try:
            batch = None if others else self._read(backward)
            is_same = batch is not None and self._known is not None and state == self._state
            self._is_proved = is_same and self._move(self._known, batch) == batch  # type: ignore
        except LookupError:
            batch, self._is_proved = None, False
        self._known, self._state = batch, state

    def _watch_gradients(self, backward: _Backward, tensors: Iterable[Tensor | None]) -> _Backward:
        """Waits for the gradient of one of the tensors that a call returned."""

        def see(number: int, gradient: Tensor | None) -> None:
            if number == backward.entry and gradient is not None:  # of a result that is used
                backward.hooks += 1
                backward.gradient = self._recorder.track(gradient)
                backward.start = read_mark(self._recorder, self._read_log())

        for tensor, output in zip(tensors, backward.call.outputs, strict=True):
            if isinstance(output, Output) and tensor is not None and tensor.grad_fn is not None:
                number = tensor.grad_fn._sequence_nr()
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, number=number: see(number, gradient)
                )
        return backward

    def _read(self, backward_of: _Backward) -> MicroBatch | None:
        """Reads what a call recorded; None where a copy of it would not be the same."""
        recorder, log = self._recorder, self._read_log()
        call, gradient = backward_of.call, backward_of.gradient
        stop, start = read_mark(recorder, log), backward_of.start
        if not (backward_of.hooks == 1 and call.stop and start and call.structure and gradient):
            return None
        own = range(call.start.storages, call.stop.storages)
        forward = read_segment(recorder, log, call.start, call.stop)
        backward = read_segment(recorder, log, start, stop, own)
        outputs = {each.storage for each in call.outputs if isinstance(each, Output)}
        made = {*own, *range(start.storages, stop.storages)}
        freed = list_freed(forward, backward)
        casts, held = find_casts(recorder, log, call, start)
        nodes = range(call.start.nodes, call.stop.nodes)
        between = recorder.operations[call.stop.operations : start.operations]
        operations = (*forward.operations, *backward.operations)
        is_closed = (
            are_own(call.outputs, own)
            and made - outputs - {*held} == {*freed} - {gradient, *call.inputs}
            and not {*call.inputs} & {*list_freed(forward)}
            and not outputs & {*freed}
            and not backward.nodes
            and not forward.runs
        )
        is_plain = (
            all(each.node is None or each.node in nodes for each in operations)
            and not any(each.node in nodes for each in between if each.phase is Phase.BACKWARD)
            and all(number < call.function for number in recorder.autograd.rewrites)
            and not have_effects(operations)
        )
        if not (is_closed and is_plain):
            return None
        return MicroBatch(
            forward, backward, call.function, call.inputs, call.origins,
            call.outputs, call.structure, gradient, casts, held,
        )  # fmt: skip

    # -- copies --------------------------------------------------------------------------------

    def _move(self, batch: MicroBatch, to: MicroBatch) -> MicroBatch:
        """Returns a micro-batch as it would be recorded at the place of another."""
        starts, shift = (to.forward.start, to.backward.start), to.function - batch.function
        places = _find_places(batch, starts, to.inputs, to.origins, to.gradient, shift)
        return replace(
            to,
            forward=move_segment(batch.forward, starts[0], places),
            backward=move_segment(batch.backward, starts[1], places),
            outputs=move_outputs(batch.outputs, places),
            casts=tuple(map(places.storage, batch.casts)),
            held=tuple(map(places.storage, batch.held)),
        )

    def _answer(self, batch: MicroBatch, call: ModelCall) -> Any:
        """Records a copy of a call, and returns tensors whose gradient records its backward."""
        recorder, log = self._recorder, self._read_log()
        self._copies += 1
        shift = self._copies * _ANOTHER_FUNCTION
        places = _find_places(batch, (call.start, None), call.inputs, call.origins, None, shift)
        forward = move_segment(batch.forward, call.start, places)
        insert_segment(recorder, log, forward)
        recorder.casts.repeat(map(places.storage, batch.casts), map(places.storage, batch.held))
        outputs = move_outputs(batch.outputs, places)
        window = self._window
        saved = {save.storage for save in forward.saves}
        held = [
            (recorder.make_unseen(each.detach), weakref.ref(each))
            for each in call.tensors
            if recorder.track(each) in saved
        ]

        def finish(gradient: Tensor) -> None:
            if window is not self._window:
                raise TraceError("backward runs in another step than its model")
            starts = call.start, read_mark(recorder, log)
            at = _find_places(
                batch, starts, call.inputs, call.origins, recorder.track(gradient), shift
            )
            backward = move_segment(batch.backward, starts[1], at)
            shared = {recorder.track(each) for each, own in held if own() is not None}
            insert_segment(recorder, log, _keep(backward, shared))
            held.clear()

        def release() -> None:  # without backward
            if window is self._window:
                recorder.ledger.release(forward_storages)

        own = range(call.start.storages, forward.stop.storages)
        kept = {each.storage for each in outputs if isinstance(each, Output)}
        forward_storages = [index for index in own if index not in kept]
        weakref.finalize(finish, release).atexit = False
        needs_grad = [each.requires_grad for each in outputs if isinstance(each, Output)]
        with self._be_silent():
            made = recorder.make_unseen(
                lambda: StandIn.make(make_outputs(recorder, outputs), needs_grad, finish)
            )
        call.tensors = []
        return tree_unflatten(answer_call(recorder, log, outputs, made), batch.structure)


def _collects(module: nn.Module) -> bool:
    """Returns whether hooks may collect what an evaluation makes, such as features."""
    return not torch.is_grad_enabled() and any(each._forward_hooks for each in module.modules())


class StandIn(torch.autograd.Function):
    """A model that was left out, whose backward runs a function."""

    @classmethod
    def make(cls, made: list[Tensor], needs_grad: list[bool], finish: Any) -> tuple[Tensor, ...]:
        anchor = torch.empty_like(made[0], dtype=torch.float32, requires_grad=True)
        return cls.apply(anchor, made, needs_grad, finish)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, made: list[Tensor], needs_grad: list[bool], finish: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.finish = finish
        pairs = zip(made, needs_grad, strict=True)
        ctx.mark_non_differentiable(*[tensor for tensor, needs in pairs if not needs])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [gradient for gradient in gradients if gradient is not None]
        ctx.finish(*given)
        return None, None, None, None


def _keep(segment: Segment, storages: set[int]) -> Segment:
    """Leaves some storages alive that a segment frees, as the script holds them this time."""
    events = [each for each in segment.events if each[0] not in storages or each[1] > 0]
    return replace(segment, events=tuple(events))


def _find_places(
    batch: MicroBatch,
    starts: tuple[Mark, Mark | None],
    inputs: tuple[int, ...],
    origins: tuple[int, ...],
    gradient: int | None,
    shift: int,
) -> Places:
    """Finds what has which number where a micro-batch begins at other marks."""
    return find_places(
        [(batch.forward, starts[0]), (batch.backward, starts[1])],
        dict(zip(batch.inputs, inputs, strict=True)) | {batch.gradient: gradient},
        dict(zip(batch.origins, origins, strict=True)),
        lambda number: number + shift if number >= batch.function else number,
    )

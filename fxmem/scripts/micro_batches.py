"""Micro-batches of a script that repeat: after two that were recorded alike, others are copied.

Scripts that accumulate gradients call the same model dozens of times before the optimizer steps.
The first call makes the gradients; the next ones differ in nothing but their place. A model's
forward, and its part of backward, are segments of the recording: once the second of two equals the
first one moved, calls in the same state are answered with tensors that have no history but the
copy of these segments. The script's own code, its loss and its loader run each time.
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fxmem.errors import TraceError
from fxmem.graph import EMPTY_CACHE, Effect, Phase
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
from fxmem.scripts.call_state import PLAIN, read_generators, read_state
from fxmem.tracing.nodes import NodeLog

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_ANOTHER_FUNCTION = 1 << 40
"""Added to the numbers of autograd's functions, so that a copy has functions of its own."""


@dataclass(slots=True)
class _Call:
    """A call of a model, and later its part of backward; storages and nodes by their indices."""

    state: Any
    start: Mark
    function: int
    inputs: tuple[int, ...]
    origins: tuple[int, ...]
    stop: Mark | None = None
    outputs: tuple[Any, ...] = ()
    structure: TreeSpec | None = None
    last_function: int = 0
    entry: int | None = None  # the function of autograd at which backward enters the model
    gradient: int | None = None
    backward: Mark | None = None
    hooks: int = 0


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a model returned."""

    storage: int
    origin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


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
        self._copies = 0
        self.forget()

    def forget(self) -> None:
        """Forgets all calls, as a window ends."""
        self._calls: list[_Call] = []
        self._known: MicroBatch | None = None
        self._state: Any = None
        self._is_proved = False
        self._window = object()

    def call(self, run: Callable[[], Any], module: nn.Module, arguments: Any) -> Any:
        """Calls a model, or answers as it would."""
        recorder, log = self._recorder, self._read_log()
        if not torch.is_grad_enabled() or torch.distributed.is_initialized():
            return run()
        with torch._C.DisableTorchFunction():
            state = read_state(module, arguments)
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            inputs = tuple(recorder.track(tensor) for tensor in tensors)
        origins = [log.find_origin(tensor) for tensor in tensors]
        nodes = tuple(-1 if origin is None else origin.node for origin in origins)
        call = _Call(state, read_mark(recorder, log), _get_sequence_nr(), inputs, nodes)
        if self._known is not None and self._is_proved and state == self._state:
            with recorder.ledger.lock:  # a thread of the script may make a batch meanwhile
                return self._answer(self._known, call, tensors)
        drawn = read_generators()
        result = run()
        call.stop, call.last_function = read_mark(recorder, log), _get_sequence_nr()
        with torch._C.DisableTorchFunction():
            if drawn == read_generators() and state == read_state(module, arguments):
                self._see_result(call, result)
        self._calls.append(call)
        return result

    def begin_backward(self, losses: Iterable[Any]) -> None:
        """Finds where backward enters the model that was called."""
        if len(self._calls) != 1:
            return
        call, entries, seen = self._calls[0], set(), set()
        left = [loss.grad_fn for loss in losses if isinstance(loss, Tensor)]
        while left:
            function = left.pop()
            if function is None or function in seen or function.name() == _ACCUMULATE:
                continue
            seen.add(function)
            number = function._sequence_nr()
            if call.function <= number < call.last_function:
                entries.add(number)
            else:
                left += [following for following, _ in function.next_functions]
        call.entry = entries.pop() if len(entries) == 1 else None

    def end_backward(self) -> None:
        """Compares the call whose backward has run with the one before."""
        if not self._calls:
            return
        (call, *others), self._calls = self._calls, []
        try:
            batch = None if others else self._read(call)
            is_same = batch is not None and self._known is not None and call.state == self._state
            self._is_proved = is_same and self._move(self._known, batch) == batch  # type: ignore
        except LookupError:
            batch, self._is_proved = None, False
        self._known, self._state = batch, call.state

    def _see_result(self, call: _Call, result: Any) -> None:
        """Notes the tensors of a result, and waits for the gradient of one of them."""
        recorder, log = self._recorder, self._read_log()
        leaves, call.structure = tree_flatten(result)
        outputs: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                outputs.append(leaf if isinstance(leaf, PLAIN) else NotImplemented)
                continue
            origin, storage = log.find_origin(leaf), recorder.track(leaf)
            # Compiled code marks no tensor as coming from a node, but names its buffers.
            node = recorder.ledger.storages[storage].node if origin is None else origin.node
            known = type(leaf) is FakeTensor and leaf.is_contiguous()
            if node is None or not known or leaf.untyped_storage().nbytes() != leaf.nbytes:
                outputs.append(NotImplemented)
                continue
            outputs.append(
                _Output(
                    storage,
                    node,
                    tuple(leaf.shape),
                    leaf.stride(),
                    leaf.dtype,
                    leaf.requires_grad,
                )
            )
            if leaf.requires_grad and leaf.grad_fn is not None:
                number = leaf.grad_fn._sequence_nr()
                leaf.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, number=number: see(number, gradient)
                )
        call.outputs = tuple(outputs)

        def see(number: int, gradient: Tensor | None) -> None:
            if number == call.entry and gradient is not None:  # of a result that is used
                call.hooks += 1
                call.gradient = recorder.track(gradient)
                call.backward = read_mark(recorder, log)

    def _read(self, call: _Call) -> MicroBatch | None:
        """Reads what a call recorded; None where a copy of it would not be the same."""
        recorder, log = self._recorder, self._read_log()
        stop, gradient = read_mark(recorder, log), call.gradient
        if not (call.hooks == 1 and call.stop and call.backward and call.structure and gradient):
            return None
        own = range(call.start.storages, call.stop.storages)
        forward = read_segment(recorder, log, call.start, call.stop)
        backward = read_segment(recorder, log, call.backward, stop, own)
        outputs = {each.storage for each in call.outputs if isinstance(each, _Output)}
        made = {*own, *range(call.backward.storages, stop.storages)}
        freed = [
            index
            for index, nbytes, _ in (*forward.events, *backward.events)
            if index is not None and index >= 0 and nbytes < 0
        ]
        casts = tuple(
            index for index in own if recorder.ledger.storages[index].cast_until is not None
        )
        exited = read_segment(recorder, log, call.stop, call.backward)
        held = tuple(index for index, nbytes, _ in exited.events if index in casts and nbytes < 0)
        nodes = range(call.start.nodes, call.stop.nodes)
        between = recorder.operations[call.stop.operations : call.backward.operations]
        operations = (*forward.operations, *backward.operations)
        is_closed = (
            NotImplemented not in call.outputs
            and len(outputs) == sum(isinstance(each, _Output) for each in call.outputs)
            and outputs <= {*own}
            and made - outputs - {*held} == {*freed} - {gradient, *call.inputs}
            and not {*call.inputs} & {index for index, nbytes, _ in forward.events if nbytes < 0}
            and not outputs & {*freed}
            and not backward.nodes
            and not forward.runs
        )
        is_plain = (
            all(each.node is None or each.node in nodes for each in operations)
            and not any(each.node in nodes for each in between if each.phase is Phase.BACKWARD)
            and all(number < call.function for number in recorder.autograd.rewrites)
            and not any(
                each.stream or each.effect is Effect.DATA or each.name == EMPTY_CACHE
                for each in operations
            )
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
            outputs=_move_outputs(batch, places),
            casts=tuple(map(places.storage, batch.casts)),
            held=tuple(map(places.storage, batch.held)),
        )

    def _answer(self, batch: MicroBatch, call: _Call, inputs: list[Tensor]) -> Any:
        """Records a copy of a call, and returns tensors whose gradient records its backward."""
        recorder, log = self._recorder, self._read_log()
        self._copies += 1
        shift = self._copies * _ANOTHER_FUNCTION
        places = _find_places(batch, (call.start, None), call.inputs, call.origins, None, shift)
        forward = move_segment(batch.forward, call.start, places)
        insert_segment(recorder, log, forward)
        recorder.casts.repeat(map(places.storage, batch.casts), map(places.storage, batch.held))
        outputs = _move_outputs(batch, places)

        def make() -> list[Tensor]:
            device = recorder.target.device
            return [
                torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=device)
                for each in outputs
                if isinstance(each, _Output)
            ]

        window = self._window
        saved = {save.storage for save in forward.saves}
        held = [
            (recorder.make_unseen(each.detach), weakref.ref(each))
            for each in inputs
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
        kept = {each.storage for each in outputs if isinstance(each, _Output)}
        forward_storages = [index for index in own if index not in kept]
        weakref.finalize(finish, release).atexit = False
        needs_grad = [each.requires_grad for each in outputs if isinstance(each, _Output)]
        with self._be_silent():
            made = recorder.make_unseen(lambda: _StandIn.make(make(), needs_grad, finish))
        tensors = iter(made)
        leaves = [next(tensors) if isinstance(each, _Output) else each for each in outputs]
        for leaf, each in zip(leaves, outputs, strict=True):
            if isinstance(each, _Output):
                recorder.ledger.adopt(leaf, each.storage)
                recorder.user_references.watch(leaf, each.storage)
                log.tag_result(leaf, each.origin)
        return tree_unflatten(leaves, batch.structure)


class _StandIn(torch.autograd.Function):
    """A model that was left out: backward records the copy of its own."""

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
    """Finds what has which number where a micro-batch begins at other marks.

    A number that stands for nothing there raises LookupError.
    """
    parts = (batch.forward, starts[0]), (batch.backward, starts[1])
    first = batch.forward.start
    renamed = dict(zip(batch.inputs, inputs, strict=True)) | {batch.gradient: gradient}
    nodes = dict(zip(batch.origins, origins, strict=True))

    def find_operation(index: int) -> int:
        for part, start in parts:
            if start and part.start.operations - 1 <= index <= part.stop.operations:
                return index - part.start.operations + start.operations
        raise LookupError(index)

    def find_storage(index: int) -> int:
        if index in renamed:
            return renamed[index]  # type: ignore[return-value]
        if index < first.storages:
            return index
        for part, start in parts:
            if start and part.start.storages <= index < part.stop.storages:
                return index - part.start.storages + start.storages
        raise LookupError(index)

    def find_node(index: int) -> int:
        if index >= first.nodes:
            return index - first.nodes + starts[0].nodes
        return nodes.get(index, index)

    return Places(
        find_operation, find_storage, find_node,
        lambda number: number + shift if number >= batch.function else number,
    )  # fmt: skip


def _move_outputs(batch: MicroBatch, places: Places) -> tuple[Any, ...]:
    return tuple(
        replace(each, storage=places.storage(each.storage), origin=places.node(each.origin))
        if isinstance(each, _Output)
        else each
        for each in batch.outputs
    )

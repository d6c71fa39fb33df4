"""Calls of a model without gradients that repeat, as in an evaluation: others are copied.

Once the second of two calls equals the first one moved, calls in the same state are answered with
tensors on copies of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from fxmem.recording.recorder import Recorder
from fxmem.recording.segments import (
    Mark,
    Places,
    Segment,
    insert_segment,
    move_segment,
    read_segment,
)
from fxmem.scripts.repeats.call_state import PLAIN
from fxmem.scripts.repeats.model_calls import (
    ModelCall,
    Output,
    answer_call,
    are_own,
    find_casts,
    find_places,
    have_effects,
    list_freed,
    make_outputs,
    move_outputs,
)
from fxmem.tracing.nodes import NodeLog


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A call of a model without gradients."""

    segment: Segment
    inputs: tuple[int, ...]
    origins: tuple[int, ...]
    outputs: tuple[Any, ...]
    structure: TreeSpec
    casts: tuple[int, ...]  # that autocast keeps until it exits
    held: tuple[int, ...]  # of these, by nothing else

    def move(self, to: Mark, inputs: tuple[int, ...], origins: tuple[int, ...]) -> _Evaluation:
        """Returns the call as it would be recorded at another place, with other inputs."""
        renamed = dict(zip(self.inputs, inputs, strict=True))
        nodes = dict(zip(self.origins, origins, strict=True))
        places: Places = find_places([(self.segment, to)], renamed, nodes, lambda number: number)
        return replace(
            self,
            segment=move_segment(self.segment, to, places),
            inputs=inputs,
            origins=origins,
            outputs=move_outputs(self.outputs, places),
            casts=tuple(map(places.storage, self.casts)),
            held=tuple(map(places.storage, self.held)),
        )


class Evaluations:
    """Leaves out calls without gradients that would be recorded like the two before.

    Args:
        recorder: Records the operators.
        read_log: Returns the log of the nodes of this window.
    """

    def __init__(self, recorder: Recorder, read_log: Callable[[], NodeLog]) -> None:
        self._recorder = recorder
        self._read_log = read_log
        self.forget()

    def forget(self) -> None:
        """Forgets all calls, as a window ends."""
        self._last: ModelCall | None = None  # which is read as the next one begins
        self._known: _Evaluation | None = None
        self._state: Any = None
        self._is_proved = False

    def answer(self, call: ModelCall, arguments: Any) -> tuple[Any] | None:
        """Answers a call that begins, in a tuple; None where the model is to run."""
        last, self._last = self._last, None
        if last is not None:
            self._compare(last, call.start)
        leaves = tree_leaves(arguments)  # of a cache, which may grow, the identity says nothing
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            self.forget()
        if self._known is None or not self._is_proved or call.state != self._state:
            return None
        recorder, log = self._recorder, self._read_log()
        with recorder.ledger.lock:
            answer = self._known.move(call.start, call.inputs, call.origins)
            insert_segment(recorder, log, answer.segment)
            recorder.casts.repeat(answer.casts, answer.held)
            made = recorder.make_unseen(lambda: make_outputs(recorder, answer.outputs))
            leaves = answer_call(recorder, log, answer.outputs, made)
        return (tree_unflatten(leaves, answer.structure),)

    def see_result(self, call: ModelCall) -> None:
        """Notes a call that has run, and whose outputs have been read."""
        self._last = call

    def _compare(self, call: ModelCall, end: Mark) -> None:
        """Compares a call with the one before; another began at ``end``."""
        known, found = self._known, self._read(call, end)
        try:
            self._is_proved = (
                None not in (known, found)
                and call.state == self._state
                and known.move(call.start, call.inputs, call.origins) == found  # type: ignore
            )
        except LookupError:
            self._is_proved = False
        self._known, self._state = found, call.state

    def _read(self, call: ModelCall, end: Mark) -> _Evaluation | None:
        """Reads what a call recorded; None where a copy of it would not be the same."""
        recorder, log = self._recorder, self._read_log()
        if call.stop is None or call.structure is None:
            return None
        segment = read_segment(recorder, log, call.start, call.stop)
        own = range(call.start.storages, call.stop.storages)
        outputs = {each.storage for each in call.outputs if isinstance(each, Output)}
        casts, held = find_casts(recorder, log, call, end)
        nodes = range(call.start.nodes, call.stop.nodes)
        is_closed = (
            are_own(call.outputs, own)
            and {*own} - outputs - {*held} == {*list_freed(segment)}
            and not segment.runs
            and not segment.saves
            and all(each.node is None or each.node in nodes for each in segment.operations)
            and not have_effects(segment.operations)
        )
        if not is_closed:
            return None
        return _Evaluation(
            segment, call.inputs, call.origins, call.outputs, call.structure, casts, held
        )

"""Calls of a model without gradients that repeat, as in an evaluation: others are copied.

Once the second of two calls equals the first one moved, calls in the same state are answered with
tensors on copies of its outputs. So are those of a model that generates, whose sizes grow as much
from each call to the next as from the one before: once the third equals what the first two lead to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from fxmem.fakes.values import find_known
from fxmem.recording.recorder import Recorder
from fxmem.recording.segments import (
    Mark,
    Places,
    Segment,
    insert_segment,
    move_segment,
    read_segment,
)
from fxmem.scripts.repeats.call_state import PLAIN, describe_leaves
from fxmem.scripts.repeats.carried import Slot, list_carried, list_slots
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
    read_outputs,
)
from fxmem.tracing.nodes import NodeLog

_MOST_GROWN = 15
"""Calls that grow and are answered one after the other: a kernel chooses otherwise at some size."""


@dataclass(frozen=True, slots=True)
class _Same:
    """A tensor that lies where it lay before the call."""


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A call of a model without gradients."""

    state: Any
    held: tuple[Any, ...]
    segment: Segment
    inputs: tuple[int, ...]
    origins: tuple[int, ...]
    outputs: tuple[Any, ...]
    kept: tuple[Any, ...]
    structure: TreeSpec
    casts: tuple[int, ...]  # that autocast keeps until it exits
    still_held: tuple[int, ...]  # of these, by nothing else

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
            kept=move_outputs(self.kept, places),
            casts=tuple(map(places.storage, self.casts)),
            still_held=tuple(map(places.storage, self.still_held)),
        )


class Evaluations:
    """Leaves out calls without gradients that would be recorded as those before lead to.

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
        self._known: tuple[_Evaluation, ...] = ()  # the two before, in the place of one that ran
        self._is_proved = False
        self._grown = 0  # calls since one has run

    def answer(self, call: ModelCall, arguments: Any) -> tuple[Any] | None:
        """Answers a call that begins, in a tuple; None where the model is to run."""
        last, self._last = self._last, None
        carried = list_carried(arguments)
        self._see_carried(call, list_slots(carried))
        if last is not None:
            self._compare(last, call.start)
        if not all(map(_is_readable, carried)):
            self.forget()
        following = self._follow(call) if self._is_proved else None
        if following is None or self._grown == _MOST_GROWN:
            return None
        if following is not self._known[-1]:
            if _reaches_limit(self._known[-1].held, following.held):
                return None
            self._grown += 1
            self._known = self._known[-1], following
        recorder, log = self._recorder, self._read_log()
        with recorder.ledger.lock:
            answer = following.move(call.start, call.inputs, call.origins)
            insert_segment(recorder, log, answer.segment)
            recorder.casts.repeat(answer.casts, answer.still_held)
            outputs = (*answer.outputs, *answer.kept)
            made = recorder.make_unseen(lambda: make_outputs(recorder, outputs))
            leaves = answer_call(recorder, log, outputs, made, carried)
        count = len(answer.outputs)
        for slot, value in zip(list_slots(carried), leaves[count:], strict=True):
            if not isinstance(value, _Same):
                slot.put(value)
        return (tree_unflatten(leaves[:count], answer.structure),)

    def see_result(self, call: ModelCall, arguments: Any) -> None:
        """Notes a call that has run, and whose outputs have been read."""
        self._last, self._grown = call, 0
        with torch._C.DisableTorchFunction():
            slots = list_slots(list_carried(arguments))
            if tuple(slot.path for slot in slots) == tuple(path for path, _ in call.held):
                call.kept = tuple(self._read_kept(call, slot) for slot in slots)

    def _see_carried(self, call: ModelCall, slots: Sequence[Slot]) -> None:
        """Notes what the objects hold that a model is given."""
        recorder, log = self._recorder, self._read_log()
        with torch._C.DisableTorchFunction():
            described = describe_leaves(slot.value for slot in slots)
            paths = (slot.path for slot in slots)
            call.held = tuple(zip(paths, described, strict=True))
            tensors = [slot.value for slot in slots if isinstance(slot.value, Tensor)]
            call.inputs += tuple(recorder.track(tensor) for tensor in tensors)
        origins = [log.find_origin(tensor) for tensor in tensors]
        call.origins += tuple(-1 if origin is None else origin.node for origin in origins)

    def _read_kept(self, call: ModelCall, slot: Slot) -> Any:
        """Reads what an object holds that a model has changed."""
        if not isinstance(slot.value, Tensor):
            return slot.value if isinstance(slot.value, PLAIN) else _Same()
        recorder, log = self._recorder, self._read_log()
        if recorder.ledger.find(slot.value) not in call.inputs:
            return read_outputs(recorder, log, slot.value)[1][0]
        operations = recorder.operations[call.start.operations :]
        is_written = any(recorder.ledger.find(slot.value) in each.writes for each in operations)
        # A value that is known would have to be computed.
        is_lost = is_written and find_known(slot.value) is not None
        return NotImplemented if is_lost else _Same()

    def _follow(self, call: ModelCall) -> _Evaluation | None:
        """Returns a call that goes on as those before, in their place; None for another."""
        last, now = self._known[-1], (call.state, call.held)
        if (last.state, last.held) == now:
            return last
        try:
            following: _Evaluation = extrapolate(self._known[0], last)
        except LookupError:
            return None
        return following if (following.state, following.held) == now else None

    def _compare(self, call: ModelCall, end: Mark) -> None:
        """Compares a call with what those before lead to; another began at ``end``."""
        found, self._is_proved = self._read(call, end), False
        if found is None or not self._known:
            self._known = () if found is None else (found,)
            return
        place = call.start, call.inputs, call.origins
        following = self._follow(call)
        try:
            self._is_proved = following is not None and following.move(*place) == found
            self._known = self._known[-1].move(*place), found
        except (LookupError, ValueError):  # a call of another kind
            self._known = (found,)

    def _read(self, call: ModelCall, end: Mark) -> _Evaluation | None:
        """Reads what a call recorded; None where a copy of it would not be the same."""
        recorder, log = self._recorder, self._read_log()
        if call.stop is None or call.structure is None or call.kept is None:
            return None
        segment = read_segment(recorder, log, call.start, call.stop)
        own = range(call.start.storages, call.stop.storages)
        results = (*call.outputs, *call.kept)
        outputs = {each.storage for each in results if isinstance(each, Output)}
        casts, held = find_casts(recorder, log, call, end)
        nodes = range(call.start.nodes, call.stop.nodes)
        freed = {*list_freed(segment)}
        is_closed = (
            are_own(results, own)
            and {*own} - outputs - {*held} == freed & {*own}
            and freed <= {*own, *call.inputs}
            and not segment.runs
            and not segment.saves
            and all(each.node is None or each.node in nodes for each in segment.operations)
            and not have_effects(segment.operations)
        )
        if not is_closed:
            return None
        return _Evaluation(
            call.state, call.held, segment, call.inputs, call.origins,
            call.outputs, call.kept, call.structure, casts, held,
        )  # fmt: skip


def _is_readable(carried: Any) -> bool:
    return isinstance(carried, (list, dict)) or hasattr(carried, "__dict__")


def _reaches_limit(last: tuple[Any, ...], following: tuple[Any, ...]) -> bool:
    """Returns whether a number that grows comes to one that stays, such as a sliding window."""
    pairs = [
        pair
        for (_, one), (_, other) in zip(last, following, strict=True)
        for pair in (
            zip(one[0], other[0], strict=True) if isinstance(one, tuple) else [(one, other)]
        )
        if type(pair[0]) is int
    ]
    limits = {one for one, other in pairs if one == other}
    return any({other - 1, other, other + 1} & limits for one, other in pairs if one != other)


def extrapolate(before: Any, last: Any) -> Any:
    """Returns what comes after two values, if numbers in them go on growing as much.

    Raises:
        LookupError: They differ in more than numbers.

    >>> extrapolate(("keys", (4, 128)), ("keys", (4, 129)))
    ('keys', (4, 130))
    """
    kind = type(last)
    if before == last:
        return last
    if type(before) is not kind:
        raise LookupError
    if kind is int:
        return 2 * last - before
    if isinstance(last, (tuple, list)) and len(before) == len(last):
        parts = [extrapolate(*pair) for pair in zip(before, last, strict=True)]
        return kind(*parts) if hasattr(last, "_fields") else kind(parts)
    if isinstance(last, dict) and before.keys() == last.keys():
        return {key: extrapolate(before[key], value) for key, value in last.items()}
    if dataclasses.is_dataclass(last):
        names = [field.name for field in dataclasses.fields(last)]
        parts = [extrapolate(getattr(before, name), getattr(last, name)) for name in names]
        return kind(**dict(zip(names, parts, strict=True)))
    raise LookupError

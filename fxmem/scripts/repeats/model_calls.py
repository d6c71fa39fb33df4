"""Calls of models as they were recorded, and tensors that answer others like them.

A call is answered with tensors that have no history but the copy of a segment of the recording
(:mod:`fxmem.recording.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from fxmem.graph import EMPTY_CACHE, Effect, Operation
from fxmem.recording.recorder import Recorder
from fxmem.recording.segments import Mark, Places, Segment, read_mark, read_segment
from fxmem.scripts.repeats.call_state import PLAIN, read_state
from fxmem.tracing.nodes import NodeLog


@dataclass(slots=True)
class ModelCall:
    """A call of a model; storages and nodes by their indices, functions of autograd by numbers.

    ``held`` describes what the objects held that the model was given, ``kept`` what they hold when
    it returns; None for what cannot be made again.
    """

    state: Any
    start: Mark
    function: int
    tensors: list[Tensor] = field(repr=False)
    inputs: tuple[int, ...]
    origins: tuple[int, ...]
    stop: Mark | None = None
    outputs: tuple[Any, ...] = ()
    structure: TreeSpec | None = None
    held: tuple[Any, ...] = ()
    kept: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a model returned."""

    storage: int
    origin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Given:
    """An object that a model was given and returned, by its number among them."""

    number: int


def begin_call(recorder: Recorder, log: NodeLog, module: nn.Module, arguments: Any) -> ModelCall:
    """Reads what decides over a call that begins."""
    with torch._C.DisableTorchFunction():
        state = read_state(module, arguments)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        inputs = tuple(recorder.track(tensor) for tensor in tensors)
    origins = [log.find_origin(tensor) for tensor in tensors]
    nodes = tuple(-1 if origin is None else origin.node for origin in origins)
    return ModelCall(state, read_mark(recorder, log), _get_sequence_nr(), tensors, inputs, nodes)


def read_outputs(
    recorder: Recorder, log: NodeLog, result: Any, given: Sequence[Any] = ()
) -> tuple[list[Tensor | None], tuple[Any, ...], TreeSpec]:
    """Reads the outputs of a call.

    Returns:
        The tensors, None for other leaves; an :class:`Output` for each, a plain value, an object
        that was given, or ``NotImplemented`` for what cannot be made again; and the structure of
        the result.
    """
    leaves, structure = tree_flatten(result)
    outputs: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            passed = (Given(at) for at, each in enumerate(given) if each is leaf)
            is_plain = isinstance(leaf, PLAIN)
            outputs.append(leaf if is_plain else next(passed, NotImplemented))
            continue
        origin, storage = log.find_origin(leaf), recorder.track(leaf)
        # Compiled code marks no tensor as coming from a node, but names its buffers.
        node = recorder.ledger.storages[storage].node if origin is None else origin.node
        known = type(leaf) is FakeTensor and leaf.is_contiguous()
        if node is None or not known or leaf.untyped_storage().nbytes() != leaf.nbytes:
            outputs.append(NotImplemented)
            continue
        shape, strides = tuple(leaf.shape), leaf.stride()
        outputs.append(Output(storage, node, shape, strides, leaf.dtype, leaf.requires_grad))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return tensors, tuple(outputs), structure


def are_own(outputs: Iterable[Any], made: range) -> bool:
    """Returns whether outputs can be made again, and are storages of the call, each another."""
    outputs = [*outputs]
    storages = [each.storage for each in outputs if isinstance(each, Output)]
    is_known = not any(each is NotImplemented for each in outputs)
    return is_known and len({*storages}) == len(storages) and {*storages} <= {*made}


def find_casts(
    recorder: Recorder, log: NodeLog, call: ModelCall, end: Mark
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds the casts of a call that autocast keeps until it exits, and those freed by ``end``."""
    assert call.stop is not None
    own = range(call.start.storages, call.stop.storages)
    casts = tuple(i for i in own if recorder.ledger.storages[i].cast_until is not None)
    exited = list_freed(read_segment(recorder, log, call.stop, end))
    return casts, tuple(index for index in exited if index in casts)


def have_effects(operations: Iterable[Operation]) -> bool:
    """Returns whether operations do more than to compute on one stream what repeats."""
    return any(
        each.stream or each.effect is Effect.DATA or each.name == EMPTY_CACHE for each in operations
    )


def list_freed(*segments: Segment) -> list[int]:
    """Lists the storages that are freed in segments."""
    events = [event for segment in segments for event in segment.events]
    return [index for index, nbytes, _ in events if index is not None and index >= 0 > nbytes]


def make_outputs(recorder: Recorder, outputs: Iterable[Any]) -> list[Tensor]:
    """Makes tensors like the outputs, on storages of their own."""
    device = recorder.target.device
    return [
        torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=device)
        for each in outputs
        if isinstance(each, Output)
    ]


def answer_call(
    recorder: Recorder,
    log: NodeLog,
    outputs: Iterable[Any],
    made: Iterable[Tensor],
    given: Sequence[Any] = (),
) -> list[Any]:
    """Returns the leaves of a result, each tensor on the storage that is recorded for it."""
    tensors = iter(made)
    leaves = []
    for each in outputs:
        leaf = next(tensors) if isinstance(each, Output) else each
        leaf = given[each.number] if isinstance(each, Given) else leaf
        leaves.append(leaf)
        if isinstance(each, Output):
            recorder.ledger.adopt(leaf, each.storage)
            recorder.user_references.watch(leaf, each.storage)
            log.tag_result(leaf, each.origin)
    return leaves


def move_outputs(outputs: Iterable[Any], places: Places) -> tuple[Any, ...]:
    """Returns outputs as they would be recorded elsewhere."""
    return tuple(
        replace(each, storage=places.storage(each.storage), origin=places.node(each.origin))
        if isinstance(each, Output)
        else each
        for each in outputs
    )


def find_places(
    parts: Iterable[tuple[Segment, Mark | None]],
    storages: Mapping[int, int | None],
    nodes: Mapping[int, int],
    find_function: Callable[[int], int],
) -> Places:
    """Finds what has which number where segments, the first of a call, begin at other marks.

    ``storages`` and ``nodes`` are those of others that have another number there. A number that
    stands for nothing there raises LookupError.
    """
    (first, at), *others = parts
    assert at is not None
    parts = [(first, at), *others]

    def find_operation(index: int) -> int:
        for part, start in parts:
            if start and part.start.operations - 1 <= index <= part.stop.operations:
                return index - part.start.operations + start.operations
        raise LookupError(index)

    def find_storage(index: int) -> int:
        if index in storages:
            return storages[index]  # type: ignore[return-value]
        if index < first.start.storages:
            return index
        for part, start in parts:
            if start and part.start.storages <= index < part.stop.storages:
                return index - part.start.storages + start.storages
        raise LookupError(index)

    def find_node(index: int) -> int:
        if index >= first.start.nodes:
            return index - first.start.nodes + at.nodes
        return nodes.get(index, index)

    return Places(find_operation, find_storage, find_node, find_function)

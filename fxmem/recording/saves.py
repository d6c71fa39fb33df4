"""References that keep storages alive: autograd's saves, the user's variables, autocast's casts.

Autograd numbers its functions in the order in which forward makes them; so each function has a
node, and backward tells when a save is released.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from fxmem.recording.ledger import Ledger
from fxmem.specs import strip_torch
from fxmem.tracing.conditions import read_autocast_on

_clone = torch.ops.aten.clone.default
_to_copy = torch.ops.aten._to_copy.default
_CLONE = "CloneBackward0"
_COPY_SLICES = "torch::autograd::CopySlices"
"""Runs the function of an operator that changed a view in place, and copies its results into
the gradient of the view's base: ``torch/csrc/autograd/functions/tensor.cpp``."""


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A save of a tensor for backward, by the function with that number."""

    storage: int
    node: int | None
    position: int
    sequence: int
    shape: tuple[int, ...]
    dtype: str


class SaveLog:
    """Notes what autograd saves.

    Attributes:
        saves: Every save.
        copies: Numbers of the functions that copied what operators in place overwrote.
    """

    def __init__(self) -> None:
        self.saves: list[SaveRecord] = []
        self.copies: set[int] = set()

    @property
    def saved(self) -> list[SaveRecord]:
        """The first save of each storage."""
        first: dict[int, SaveRecord] = {}
        for save in self.saves:
            first.setdefault(save.storage, save)
        return [*first.values()]

    def add(
        self, storage: int, tensor: Tensor, maker: Any, node: int | None, position: int
    ) -> None:
        """Notes a save of the function that autograd is making, of a tensor that ``maker`` made."""
        saver, sequence = _find_saver(maker), _get_sequence_nr() - 1
        if saver < sequence and maker.name() == _CLONE:
            self.copies.add(sequence)
        shape, dtype = tuple(tensor.shape), strip_torch(tensor.dtype)
        self.saves.append(SaveRecord(storage, node, position, saver, shape, dtype))


def is_own_output(maker: Any) -> bool:
    """Tells whether a tensor with this ``grad_fn`` is saved by the function that made it."""
    return maker is not None and maker._sequence_nr() == _get_sequence_nr() - 1


def _find_saver(maker: Any) -> int:
    sequence = _get_sequence_nr() - 1  # a function gets its number before it saves
    if maker is None or maker._sequence_nr() != sequence:
        return sequence
    if maker.name() == _CLONE:
        return sequence - 1  # in place: a copy of the argument is saved, which has a number too
    base = maker.next_functions[0][0] if maker.next_functions else None
    if base is not None and base.name() == _COPY_SLICES:  # a changed view, made anew
        return int(base._sequence_nr())
    return sequence


class SequenceLog:
    """Notes which numbers autograd gave to the functions of each node, and when they ran.

    Attributes:
        ran: By a function's number, the first and last operation of its backward.
        returned: By a function's number, the last operation before its backward returned: the
            engine's sums of gradients in its name come later. Only of functions that saved what
            other functions made.
        copied: By the number of a ``CopySlices``, the first operation of the function that it runs.
        early: The nodes whose backward runs in forward, as in ``torch.autograd.grad``.
    """

    def __init__(self) -> None:
        self.ran: dict[int, tuple[int, int]] = {}
        self.returned: dict[int, int] = {}
        self.copied: dict[int, int] = {}
        self.early: set[int] = set()
        self._unpacked: list[weakref.ref[Tensor]] = []
        self._entered = 0
        self._starts: list[int] = []
        self._ends: list[tuple[int, int]] = []

    def enter_node(self) -> None:
        self._entered = _get_sequence_nr()

    def exit_node(self, node: int) -> None:
        """Gives the functions that were numbered since the node began to it."""
        sequence = _get_sequence_nr()
        if sequence > self._entered:
            self._starts.append(self._entered)
            self._ends.append((sequence, node))

    def see_views(self, results: Iterable[Tensor]) -> None:
        """Watches the gradients of views that the node changed in place and returns.

        Autograd makes the function of such a view anew, after the base's ``CopySlices``. In eager
        that is ``AsStridedBackward0``, which fills a new tensor of the base's size
        (``as_strided_backward`` in ``torch/csrc/autograd/FunctionsManual.cpp``); tensors of a
        Python class have the view's own function, which hands on its gradient's memory.
        """
        for tensor in results:
            base = tensor._base
            if base is not None and tensor.numel() == base.numel() and self._is_changed(tensor):
                function: Any = tensor.grad_fn
                function.register_prehook(_copy_gradients)

    def _is_changed(self, view: Tensor) -> bool:
        function: Any = view.grad_fn
        while function is not None and function._sequence_nr() >= self._entered:
            if function.name() == _COPY_SLICES:
                return True
            function = function.next_functions[0][0] if function.next_functions else None
        return False

    def see_operation(self, function: Any, operation: int, operator: Any = None) -> None:
        """Notes an operation that a function of autograd runs."""
        sequence = function._sequence_nr()
        self.ran[sequence] = self.ran.get(sequence, (operation, 0))[0], operation
        if operator is _clone and function.name() == _COPY_SLICES:  # the gradient it hands on
            self.copied.setdefault(sequence, operation + 1)

    def watch_unpacked(self, function: Any, tensor: Tensor, ledger: Ledger) -> None:
        """Sees a function of autograd return, when a tensor that it unpacked dies.

        Nothing but the function holds the tensor; or it is a gradient without a number.
        """
        sequence = function._sequence_nr()

        def see_return(_: object) -> None:
            self.returned[sequence] = max(ledger.operation, self.returned.get(sequence, 0))

        self._unpacked.append(weakref.ref(tensor, see_return))

    def see_early(self, function: Any) -> None:
        """Notes a function of autograd, or None, that runs an operation before backward."""
        node = None if function is None else self.find_node(function)
        if node is not None:
            self.early.add(node)

    def find_node(self, function: Any) -> int | None:
        """Finds the node whose forward made a function of autograd.

        None for functions without a number: AccumulateGrad, a graph recomputed in backward.
        """
        sequence = function._sequence_nr()
        at = bisect_right(self._starts, sequence) - 1
        if at >= 0 and sequence < self._ends[at][0]:
            return self._ends[at][1]
        return None


def _copy_gradients(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)


class UserReferences:
    """Sees the user's code release tensors that nodes returned.

    Attributes:
        let_go: By storage, the operation in which the user's code released a tensor on it last.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.let_go: dict[int, int] = {}
        self._ledger = ledger
        self._watched: dict[int, tuple[int, weakref.ref[Tensor]]] = {}

    @property
    def held(self) -> set[int]:
        """The storages that the user's code still references."""
        return {index for index, _ in self._watched.values()}

    def watch(self, tensor: Tensor, storage: int) -> None:
        key = id(tensor)
        see_end = functools.partial(self._see_end, key)
        self._watched[key] = storage, weakref.ref(tensor, see_end)

    def includes(self, tensor: Tensor) -> bool:
        """Tells whether a node returned a tensor, or the base that it is a view of and so keeps."""
        if id(tensor) in self._watched:
            return True
        return tensor._is_view() and id(tensor._base) in self._watched

    def _see_end(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        index, _ = self._watched.pop(key)
        if self._ledger.recording:
            self.let_go[index] = self._ledger.operation


class CastLog:
    """Notes the casts of weights that autocast keeps for other uses until it exits.

    Source: ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp``; ``__exit__`` in
    ``torch/amp/autocast_mode.py`` clears the cache when the outermost autocast exits.

    Attributes:
        casts_weights: Whether autocast casts weights, kept or not.
    """

    def __init__(self, ledger: Ledger, device: str) -> None:
        self._ledger = ledger
        self._device = device
        self.casts_weights = False
        self._dtype: torch.dtype | None = None
        self._keeps = False
        self._made: list[int] = []  # in the node that runs
        self._kept: list[int] = []

    def enter_node(self) -> None:
        # Below a node, autocast reads as off.
        self._dtype = read_autocast_on(self._device)
        self._keeps = torch.is_autocast_cache_enabled()

    def exit_node(self, results: Container[int]) -> None:
        # The user's own code has made a cast that is the node's result.
        storages = self._ledger.storages
        made = (i for i in self._made if i not in results and storages[i].died is None)
        self._kept.extend(made)
        self._made.clear()
        self._dtype = None

    def see(self, func: Any, args: tuple[Any, ...], result: Tensor, storage: int) -> None:
        """Notes a cast by an operator that has run, whose result shares that storage."""
        if self._dtype is None or func is not _to_copy or result.dtype != self._dtype:
            return
        weight = args[0]
        is_leaf = weight.requires_grad and weight.is_leaf and not weight._is_view()
        if is_leaf and weight.dtype == torch.float32:
            self.casts_weights = True
            if self._keeps:
                self._made.append(storage)

    @contextlib.contextmanager
    def watch_exits(self) -> Iterator[None]:
        clear_cache = torch.clear_autocast_cache

        def clear_watched() -> None:
            for index in self._kept:
                self._ledger.storages[index].cast_until = self._ledger.operation
            self._kept.clear()
            clear_cache()

        torch.clear_autocast_cache = clear_watched
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear_cache

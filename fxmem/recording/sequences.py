"""Which node's backward runs: autograd numbers its functions, and so the nodes that made them."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from fxmem.recording.ledger import Ledger
from fxmem.recording.saving import COPY_SLICES

_clone = torch.ops.aten.clone.default


class SequenceLog:
    """Notes which numbers autograd gave to the functions of each node, and when they ran.

    Attributes:
        ran: By the number of a function, the first and last operation of its backward.
        returned: Likewise the last operation of those before it returned: what adds up gradients
            in its name comes later. Only of functions that saved what other functions made.
        copied: By the number of a ``CopySlices``, the first operation of the function that it runs.
        early: The nodes whose backward forward runs, as ``torch.autograd.grad`` in it does.
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
        """A node begins."""
        self._entered = _get_sequence_nr()

    def exit_node(self, node: int) -> None:
        """The node has returned; what was numbered since it began is its own."""
        sequence = _get_sequence_nr()
        if sequence > self._entered:
            self._starts.append(self._entered)
            self._ends.append((sequence, node))

    def see_views(self, results: Iterable[Tensor]) -> None:
        """The node that runs returns tensors, among them views that it changed in place.

        Autograd makes the function of such a view anew, after the base's ``CopySlices``. In eager
        that is ``AsStridedBackward0``, which fills a new tensor of the base's size
        (``as_strided_backward`` in ``torch/csrc/autograd/FunctionsManual.cpp``); tensors of a
        Python class have the view's own, which hands on its gradient's memory where all is seen.
        """
        for tensor in results:
            base = tensor._base
            if base is not None and tensor.numel() == base.numel() and self._is_changed(tensor):
                function: Any = tensor.grad_fn
                function.register_prehook(_copy_gradients)

    def _is_changed(self, view: Tensor) -> bool:
        """Whether the node that runs changed a view in place, for autograd to see."""
        function: Any = view.grad_fn
        while function is not None and function._sequence_nr() >= self._entered:
            if function.name() == COPY_SLICES:
                return True
            function = function.next_functions[0][0] if function.next_functions else None
        return False

    def see_operation(self, function: Any, operation: int, operator: Any = None) -> None:
        """A function of autograd runs an operation, which is that of an operator."""
        sequence = function._sequence_nr()
        self.ran[sequence] = self.ran.get(sequence, (operation, 0))[0], operation
        if operator is _clone and function.name() == COPY_SLICES:  # the gradient it hands on
            self.copied.setdefault(sequence, operation + 1)

    def watch_unpacked(self, function: Any, tensor: Tensor, ledger: Ledger) -> None:
        """A function of autograd took out a tensor of its own, which goes when it returns.

        Args:
            function: Of autograd.
            tensor: Made as it was taken out, which nothing but the function holds; or a gradient
                that the function keeps, which has no number.
            ledger: Knows which operation ran last.
        """
        sequence = function._sequence_nr()

        def see_return(_: object) -> None:
            self.returned[sequence] = max(ledger.operation, self.returned.get(sequence, 0))

        self._unpacked.append(weakref.ref(tensor, see_return))

    def see_early(self, function: Any) -> None:
        """A function of autograd, or none, runs an operation before backward."""
        node = None if function is None else self.find_node(function)
        if node is not None:
            self.early.add(node)

    def find_node(self, function: Any) -> int | None:
        """The node whose forward made a function of autograd.

        None for what has no number of its own: AccumulateGrad, a graph recomputed in backward.
        """
        sequence = function._sequence_nr()
        at = bisect_right(self._starts, sequence) - 1
        if at >= 0 and sequence < self._ends[at][0]:
            return self._ends[at][1]
        return None


def _copy_gradients(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

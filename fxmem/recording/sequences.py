"""Which node's backward runs: autograd numbers its functions, and so the nodes that made them."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import Any

from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from fxmem.recording.ledger import Ledger


class SequenceLog:
    """Notes which numbers autograd gave to the functions of each node, and when they ran.

    Attributes:
        ran: By the number of a function, the first and last operation of its backward.
        returned: Likewise the last operation of those before it returned: what adds up gradients
            in its name comes later. Only of functions that saved what other functions made.
        early: The nodes whose backward forward runs, as ``torch.autograd.grad`` in it does.
    """

    def __init__(self) -> None:
        self.ran: dict[int, tuple[int, int]] = {}
        self.returned: dict[int, int] = {}
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

    def see_operation(self, function: Any, operation: int) -> None:
        """A function of autograd runs an operation."""
        sequence = function._sequence_nr()
        self.ran[sequence] = self.ran.get(sequence, (operation, 0))[0], operation

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

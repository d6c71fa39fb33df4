"""The tensors that stand for Python numbers, where autograd keeps them until backward.

``x * 0.5`` multiplies with a tensor of no dimensions, a wrapped number, which lies on the CPU.
``MulBackward0`` and the functions of division save it for the gradient of ``x``. Hooks on saved
tensors do not see it, and so a checkpoint does not let go of it either.

Source: ``SavedVariable::SavedVariable`` in ``torch/csrc/autograd/saved_variable.cpp``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fxmem.graph import Category
from fxmem.recording.ledger import NO_STORAGE, Ledger
from fxmem.recording.records import SaveRecord
from fxmem.recording.saving import SaveLog

_aten = torch.ops.aten
_SAVING = frozenset(
    (
        _aten.mul.Tensor,
        _aten.mul_.Tensor,
        _aten.div.Tensor,
        _aten.div_.Tensor,
        _aten.div.Tensor_mode,
        _aten.div_.Tensor_mode,
    )
)
_BYTES = {bool: 1, int: 8, float: 8, complex: 16}


class NumberLog:
    """Sees numbers come and go.

    Args:
        ledger: Of the storages.
        saving: What autograd keeps.
    """

    def __init__(self, ledger: Ledger, saving: SaveLog) -> None:
        self._ledger = ledger
        self._saving = saving
        self._pending: tuple[weakref.ref[torch.Tensor], int, int | None] | None = None

    def measure(self, func: Any, args: tuple[Any, ...]) -> int:
        """The bytes of the number among an operator's arguments that autograd keeps; 0 for none."""
        if func not in _SAVING or not self._ledger.counts_all:
            return 0
        if not (torch.is_grad_enabled() and args[0].requires_grad):
            return 0
        return _BYTES.get(type(args[1]), 0)

    def expect(self, result: torch.Tensor, operation: int, node: int | None) -> None:
        """An operator has run whose number autograd keeps, as can be seen once it has returned.

        Args:
            result: What it returned.
            operation: Its index.
            node: The node that runs.
        """
        self._pending = weakref.ref(result), operation, node

    def look(self) -> None:
        """Finds what the operator before has left, if it has kept a number."""
        if self._pending is None:
            return
        reference, operation, node = self._pending
        self._pending = None
        result = reference()
        # A view that was changed in place makes its function anew, under a lock that whoever runs
        # the operator at hand may hold: ``VariableHooks::grad_fn``.
        if result is not None and result._is_view():
            return
        with torch._C.DisableTorchFunction():
            function = None if result is None else result.grad_fn
            number = getattr(function, "_saved_other", None)
            if function is None or number is None:
                return
            index = self._ledger.track(number, operation, node)
            if index == NO_STORAGE:
                return
            self._ledger.storages[index].category = Category.WORKSPACE
            # Of no node: what is computed again does not keep it in its place.
            save = SaveRecord(index, None, operation + 1, function._sequence_nr())
            self._saving.saves.append(save)

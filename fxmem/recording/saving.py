"""What autograd keeps for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from fxmem.recording.records import SavedRecord, SaveRecord
from fxmem.specs import strip_torch

_CLONE = "CloneBackward0"
COPY_SLICES = "torch::autograd::CopySlices"
"""Runs the function of an operator that changed a view in place, and puts what that makes into
the gradient of the view's base: ``torch/csrc/autograd/functions/tensor.cpp``."""


class SaveLog:
    """Writes down what autograd saves.

    Attributes:
        saved: What was saved, each storage once.
        saves: Every time that something was.
        copies: The numbers that went to copies of what operators in place overwrote.
    """

    def __init__(self) -> None:
        self.saved: list[SavedRecord] = []
        self.saves: list[SaveRecord] = []
        self.copies: set[int] = set()
        self._storages: set[int] = set()

    def add(
        self, storage: int, tensor: torch.Tensor, maker: Any, node: int | None, position: int
    ) -> None:
        """Notes what the function saves that autograd is making.

        Args:
            storage: The index of the storage.
            tensor: What is saved of it.
            maker: The function that made what is saved, or None.
            node: The node that runs.
            position: The index of the operator that comes next.
        """
        saver, sequence = _find_saver(maker), _get_sequence_nr() - 1
        if saver < sequence and maker.name() == _CLONE:
            self.copies.add(sequence)
        self.saves.append(SaveRecord(storage, node, position, saver))
        if storage not in self._storages:
            self._storages.add(storage)
            shape, dtype = tuple(tensor.shape), strip_torch(tensor.dtype)
            self.saved.append(SavedRecord(storage, node, shape, dtype))


def is_own_output(maker: Any) -> bool:
    """Whether a function that saves a tensor is the one that made it.

    Args:
        maker: The tensor's ``grad_fn``, or None.
    """
    return maker is not None and maker._sequence_nr() == _get_sequence_nr() - 1


def _find_saver(maker: Any) -> int:
    """The number of the function that saves what another has made."""
    sequence = _get_sequence_nr() - 1  # a function gets its number before it saves
    if maker is None or maker._sequence_nr() != sequence:
        return sequence
    if maker.name() == _CLONE:
        return sequence - 1  # in place: it saves a copy of its argument, which has a number too
    base = maker.next_functions[0][0] if maker.next_functions else None
    if base is not None and base.name() == COPY_SLICES:  # a view that it changed, made anew
        return int(base._sequence_nr())
    return sequence

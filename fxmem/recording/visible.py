"""Which results of nodes the user's code still holds, and when it let go of the others."""

from __future__ import annotations

import functools
import weakref

import torch

from fxmem.recording.ledger import Ledger


class VisibleTensors:
    """Sees the user's code let go of tensors.

    Args:
        ledger: Says which operation runs, and whether the step is on.

    Attributes:
        let_go: By storage, the operation in which the user's code let go of a tensor on it last.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.let_go: dict[int, int] = {}
        self._ledger = ledger
        self._visible: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}

    @property
    def held(self) -> set[int]:
        """The storages of tensors that nodes returned and that the user's code still holds."""
        return {index for index, _ in self._visible.values()}

    def watch(self, tensor: torch.Tensor, storage: int) -> None:
        """Sees the end of a tensor that a node returned.

        Args:
            tensor: The tensor.
            storage: The index of its storage.
        """
        key = id(tensor)
        see_end = functools.partial(self._see_end, key)
        self._visible[key] = storage, weakref.ref(tensor, see_end)

    def is_visible(self, tensor: torch.Tensor) -> bool:
        """Whether a node returned a tensor, or what it is a view of and so keeps."""
        if id(tensor) in self._visible:
            return True
        return tensor._is_view() and id(tensor._base) in self._visible

    def _see_end(self, key: int, _reference: weakref.ref[torch.Tensor]) -> None:
        index, _ = self._visible.pop(key)
        if self._ledger.recording:
            self.let_go[index] = self._ledger.operation

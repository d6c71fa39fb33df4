"""The casts of weights that autocast keeps for other uses until the outermost of it exits.

Source: ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp``; ``__exit__`` in
``torch/amp/autocast_mode.py`` clears what it keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Any

import torch

from fxmem.recording.ledger import Ledger
from fxmem.tracing.contexts import read_autocast_on

_to_copy = torch.ops.aten._to_copy.default


class CastLog:
    """Sees casts come into autocast's cache, and go.

    Args:
        ledger: Of the storages.
        device: Whose autocast it is, by its name.

    Attributes:
        casts_weights: Whether it casts weights, kept or not.
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
        """A node begins: below it, autocast is off to who asks."""
        self._dtype = read_autocast_on(self._device)
        self._keeps = torch.is_autocast_cache_enabled()

    def exit_node(self, results: Container[int]) -> None:
        """It is over, and this is what its result lies on.

        What is its result, the user's own code has cast; what is gone, nothing keeps.
        """
        storages = self._ledger.storages
        made = (i for i in self._made if i not in results and storages[i].died is None)
        self._kept.extend(made)
        self._made.clear()
        self._dtype = None

    def see(self, func: Any, args: tuple[Any, ...], result: torch.Tensor, storage: int) -> None:
        """An operator has run.

        Args:
            func: The operator.
            args: Its arguments.
            result: What it returned.
            storage: The index of what that lies on.
        """
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
        """Sees the outermost autocast exit while active."""
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

"""Casts of weights that autocast keeps for other uses."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from fxmem.patching import patch
from fxmem.recording.ledger import Ledger
from fxmem.tracing.conditions import read_autocast_on
from fxmem.versions.operators import aten


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
        self._held: list[int] = []  # by no tensor, but as if autocast did

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
        is_cast = func is aten._to_copy.default and result.dtype == self._dtype
        if self._dtype is None or not is_cast:
            return
        weight = args[0]
        is_leaf = weight.requires_grad and weight.is_leaf and not weight._is_view()
        if is_leaf and weight.dtype == torch.float32:
            self.casts_weights = True
            if self._keeps:
                self._made.append(storage)

    def repeat(self, kept: Iterable[int], held: Iterable[int]) -> None:
        """Notes casts that were left out, some of which nothing else would hold."""
        self._kept += kept
        self._held += held

    def forget(self) -> None:
        """Forgets the casts so far, as a step ends."""
        self._kept.clear()
        self._held.clear()

    def watch_exits(self) -> contextlib.AbstractContextManager[None]:
        """Sees the outermost autocast end, which frees the casts."""
        clear_cache = torch.clear_autocast_cache

        def clear_watched() -> None:
            for index in self._kept:
                self._ledger.storages[index].cast_until = self._ledger.operation
            with self._ledger.order_deaths():  # autocast keeps them by address
                clear_cache()
            self._ledger.release(self._held)
            self.forget()

        return patch({torch: {"clear_autocast_cache": clear_watched}})

"""Every storage of a step, its birth and its death."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.graph import RESIDENT, Category
from fxmem.recording.records import LiveStorage
from fxmem.specs import strip_torch

_HOST = torch.device("cpu")
NO_STORAGE = -2
"""The index of what occupies no memory of its own."""


class Ledger:
    """Keeps account of the storages of tensors on one device.

    Args:
        device: Where the tensors lie that count; on the CPU all do.

    Attributes:
        storages: Every storage seen, in order of allocation.
        warmup: Allocations and frees before :meth:`begin`, as in the memory graph.
        live_bytes: After each allocation and free since :meth:`begin`.
        live_now_bytes: What is alive.
        peak_bytes: The most that was alive since somebody set it.
        resident_bytes: Live when the step began.
        operation: Index of the latest operation, in which what happens now happens.
        counts_all: Whether tensors anywhere count.
        recording: Whether births and deaths belong to the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.storages: list[LiveStorage] = []
        self.warmup: list[tuple[int | None, int]] = []
        self.live_bytes: list[int] = []
        self.live_now_bytes = self.peak_bytes = self.resident_bytes = 0
        self.operation = -1
        self.counts_all = device == _HOST
        self.recording = False
        self._device = device
        self._begun = False
        self._live: dict[int, int] = {}  # address of the StorageImpl -> index
        self._references: dict[int, weakref.ref[Any]] = {}  # by the same address
        self._kept: set[tuple[str, bool]] = set()
        self._deaths = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether what leads to the step is being written down."""
        return not self._begun

    def begin(self) -> None:
        """Starts the step; whatever is alive now is resident."""
        alive = sorted(self._live.values())
        renamed = {old: new for new, old in enumerate(alive)}
        self.storages = [self.storages[old] for old in alive]
        self._live = {key: renamed[old] for key, old in self._live.items()}
        for storage in self.storages:
            storage.born, storage.node = RESIDENT, None
            if storage.category is Category.OUTPUT:
                storage.name += " of the step before"
            elif storage.category is Category.TEMPORARY:
                # A cache that the model keeps, or a tensor that the step before left behind.
                storage.category, storage.name = Category.BUFFER, "kept from the step before"
        self.warmup = [
            (None if old is None else renamed.get(old, ~old), nbytes) for old, nbytes in self.warmup
        ]
        self.resident_bytes = self.live_now_bytes
        self.operation = 0
        self.recording = self._begun = True

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        if self.counts_all:
            return True
        return isinstance(tensor, FakeTensor) and tensor.fake_device == self._device

    def find(self, tensor: torch.Tensor) -> int:
        """The index of a tensor's storage, if it is watched; else NO_STORAGE."""
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:
            return NO_STORAGE
        return self._live.get(key, NO_STORAGE)

    def track(self, tensor: torch.Tensor, born: int | None = None, node: int | None = None) -> int:
        """The index of a tensor's storage, which is watched from now on.

        Args:
            tensor: Any tensor; one without a storage (sparse), or in other memory than the
                device's, is passed over.
            born: The operation that allocated it, the latest if None. RESIDENT for a tensor
                that no operator of the step made, such as a constant of the user's module.
            node: The node it belongs to.
        """
        if not self.is_counted(tensor):
            return NO_STORAGE
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return NO_STORAGE
        key, nbytes = storage._cdata, storage.nbytes()
        index = self._live.get(key)
        if index is not None:
            return index
        if nbytes == 0:
            return NO_STORAGE
        if born is None:
            born = self.operation
        index = self._add(
            key, LiveStorage(nbytes, tuple(tensor.shape), strip_torch(tensor.dtype), born, node)
        )
        self._references[key] = weakref.ref(storage, functools.partial(self._see_death, key))
        if born == RESIDENT and self.recording:
            self._add_resident(nbytes)
        else:
            self.change(nbytes)
        return index

    def keep(self, name: str, nbytes: int, node: int | None, *, by_engine: bool) -> None:
        """Notes what a library takes at its first use in a thread, and does not give back.

        Args:
            name: What it is.
            nbytes: Its size.
            node: The node at which it is taken.
            by_engine: Whether the thread is the autograd engine's, which has memory of its own.
        """
        if not nbytes or (name, by_engine) in self._kept:
            return
        self._kept.add((name, by_engine))
        storage = LiveStorage(nbytes, (nbytes,), "uint8", self.operation, node)
        storage.category, storage.name = Category.WORKSPACE, name
        self._add(-len(self._kept), storage)  # no address
        self.change(nbytes)

    def hold(self, nbytes: int) -> None:
        """What a kernel takes and gives back before it returns."""
        if not nbytes:
            return
        if self.is_warming_up:
            self.warmup += [(None, nbytes), (None, -nbytes)]
        elif self.recording:
            self.change(nbytes)
            self.change(-nbytes)

    def take(self, nbytes: int) -> int:
        """A kernel takes a block, which it gives back before it returns; its number."""
        index = len(self.storages)
        if self.is_warming_up:
            self.storages.append(LiveStorage(nbytes, (nbytes,), "uint8", self.operation, None))
            self.warmup.append((index, nbytes))
        elif self.recording:
            self.change(nbytes)
        return index

    def give_back(self, index: int, nbytes: int) -> None:
        """The kernel gives the block of that number back."""
        if self.is_warming_up:
            self.warmup.append((index, -nbytes))
        elif self.recording:
            self.change(-nbytes)

    def change(self, delta_bytes: int) -> None:
        """Counts an allocation or a free."""
        self.live_now_bytes += delta_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_now_bytes)
        if self.recording:
            self.live_bytes.append(self.live_now_bytes)

    def _add(self, key: int, storage: LiveStorage) -> int:
        index = len(self.storages)
        self.storages.append(storage)
        self._live[key] = index
        if not self._begun:
            self.warmup.append((index, storage.nbytes))
        return index

    def _see_death(self, key: int, _reference: weakref.ref[Any]) -> None:
        del self._references[key]
        index = self._live.pop(key)
        storage = self.storages[index]
        if not self._begun:
            self.warmup.append((index, -storage.nbytes))
        if self.recording:
            storage.died = self.operation
            storage.death_rank = self._deaths = self._deaths + 1
        self.change(-storage.nbytes)

    def _add_resident(self, nbytes: int) -> None:
        """It was there all the time, though it is seen only now."""
        self.resident_bytes += nbytes
        self.live_now_bytes += nbytes
        self.peak_bytes += nbytes
        self.live_bytes = [live + nbytes for live in self.live_bytes]

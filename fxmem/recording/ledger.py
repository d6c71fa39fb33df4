"""Ledger of a step's storages: their births and deaths, and the live bytes."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.graph import (
    NEXT_RESULT,
    RESIDENT,
    Blocks,
    Category,
    FirstOperation,
    Operation,
    Phase,
)
from fxmem.kernels.registry import Workspace
from fxmem.specs import strip_torch

_HOST = torch.device("cpu")
NO_STORAGE = -2
"""The index of a tensor without memory of its own."""
_SKIPPED = ("step.begin", "random.get_state", str(torch.ops.aten.detach.default))
"""Operations of the steady step alone: the recording's own, and what its hooks add to backward."""


@dataclass(slots=True)
class LiveStorage:
    """A storage under observation; :class:`fxmem.graph.Storage` once the step is over."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    born: int
    node: int | None
    died: int | None = None
    death_rank: int = 0
    category: Category = Category.TEMPORARY
    name: str = ""
    saved_by: list[int] = field(default_factory=list)
    cast_until: int | None = None


class Ledger:
    """Counts the storages of tensors on one device; on the CPU, of all tensors.

    Attributes:
        storages: Every storage seen, in order of allocation.
        warmup: Allocations and frees before :meth:`begin`, as in the memory graph.
        live_bytes: Live bytes after each allocation and free since :meth:`begin`.
        live_now_bytes: Live bytes now.
        peak_bytes: Most live bytes since a caller last set this.
        resident_bytes: Live bytes when the step began.
        operation: Index of the latest operation.
        counts_all: Whether tensors on any device count.
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
        """Whether the step has not begun."""
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
        """Tells whether a tensor lies on the device."""
        if self.counts_all:
            return True
        return isinstance(tensor, FakeTensor) and tensor.fake_device == self._device

    def find(self, tensor: torch.Tensor) -> int:
        """Finds the index of a tensor's storage; NO_STORAGE if it is not watched."""
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:
            return NO_STORAGE
        return self._live.get(key, NO_STORAGE)

    def track(self, tensor: torch.Tensor, born: int | None = None, node: int | None = None) -> int:
        """Watches a tensor's storage from now on, and returns its index.

        It was born in the latest operation, or in the one given: RESIDENT for a tensor that no
        operator of the step made, such as a constant of the user's module.
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
        """Adds memory that a library takes at its first use in a thread, and never frees.

        The autograd engine's thread has memory of its own.
        """
        if not nbytes or (name, by_engine) in self._kept:
            return
        self._kept.add((name, by_engine))
        storage = LiveStorage(nbytes, (nbytes,), "uint8", self.operation, node)
        storage.category, storage.name = Category.WORKSPACE, name
        self._add(-len(self._kept), storage)  # no address
        self.change(nbytes)

    def hold(self, nbytes: int) -> None:
        """Counts memory that a kernel allocates and frees before it returns."""
        if not nbytes:
            return
        if self.is_warming_up:
            self.warmup += [(None, nbytes), (None, -nbytes)]
        elif self.recording:
            self.change(nbytes)
            self.change(-nbytes)

    def take(self, nbytes: int) -> int:
        """Counts a block that a kernel allocates inside itself; returns the block's number."""
        index = len(self.storages)
        if self.is_warming_up:
            self.storages.append(LiveStorage(nbytes, (nbytes,), "uint8", self.operation, None))
            self.warmup.append((index, nbytes))
        elif self.recording:
            self.change(nbytes)
        return index

    def give_back(self, index: int, nbytes: int) -> None:
        """Counts the free of a block of :meth:`take`."""
        if self.is_warming_up:
            self.warmup.append((index, -nbytes))
        elif self.recording:
            self.change(-nbytes)

    def allocate(
        self,
        made: Sequence[torch.Tensor],
        workspace: Workspace,
        see: Callable[[torch.Tensor], object],
    ) -> Blocks:
        """Counts an operator's results and its kernel's blocks, in the kernel's order.

        Returns:
            The blocks, as the memory graph has them.
        """
        if isinstance(workspace, int):
            for tensor in made:
                see(tensor)
            self.hold(workspace)
            return ()
        named = {~block for block, _ in workspace}
        for at, tensor in enumerate(made):
            if at not in named:
                see(tensor)
        blocks, held = list[tuple[int, int]](), dict[int, int]()
        for block, nbytes in workspace:
            if block < 0:
                count = len(self.storages)
                see(made[~block])
                blocks += [(NEXT_RESULT, 0)] * (len(self.storages) - count)
                continue
            blocks.append((block, nbytes))
            if nbytes > 0:
                held[block] = self.take(nbytes)
            else:
                self.give_back(held[block], -nbytes)
        return tuple(blocks)

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
        """Counts a storage that was there all the time, though it is seen only now."""
        self.resident_bytes += nbytes
        self.live_now_bytes += nbytes
        self.peak_bytes += nbytes
        self.live_bytes = [live + nbytes for live in self.live_bytes]


class FirstStepLog:
    """Notes to which operator each allocation and free of the first step belongs."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Phase, int, Any]] = []
        self._counts: dict[Phase, int] = defaultdict(int)

    def see(self, func: Any, phase: Phase, start: int) -> None:
        """Notes an operator that has run, after ``start`` allocations and frees."""
        rank = self._counts[phase]
        if func is torch.ops.aten.detach.default or (phase is Phase.OPTIMIZER and rank):
            return
        if self._marks and self._marks[-1][0] == start:
            self._marks.pop()  # the operator before neither allocated nor freed
        self._marks.append((start, phase, rank, func))
        self._counts[phase] = rank + 1

    def list_operations(self, operations: Iterable[Operation]) -> Iterator[FirstOperation]:
        """Lists the operators, each with its twin among those of the steady step.

        Both steps run the same operators in the same order.
        """
        steady: dict[Phase, list[Operation]] = defaultdict(list)
        for operation in operations:
            if operation.name not in _SKIPPED:
                steady[operation.phase].append(operation)
        for start, phase, rank, func in self._marks:
            twins = steady[phase]
            found = twins[rank] if phase is not Phase.OPTIMIZER and rank < len(twins) else None
            is_twin = found is not None and found.name == str(func)
            yield FirstOperation(start, phase, found.index if found and is_twin else None)

"""Ledger of a step's storages: births, deaths, live bytes, and the references that keep them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.graph import (
    NEXT_RESULT,
    RESIDENT,
    Blocks,
    Category,
)
from fxmem.kernels.cuda.gpu import find_stream
from fxmem.kernels.registry import Workspace
from fxmem.specs import strip_torch

_HOST, _META = torch.device("cpu"), torch.device("meta")
KEPT = "kept from the step before"
"""The name of a tensor that a step left behind, and that nothing else names."""
_EARLIER = " of the step before"
NO_STORAGE = -2
"""The index of a tensor without memory of its own."""


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
    stream: int = 0


Event = tuple[int | None, int, int | None]
"""An allocation or a free: a storage by its index, another block by a negative number, or None for
one that is not followed; its bytes, negative where it is freed; of a storage that is freed, the
operation."""


class Ledger:
    """Counts the storages of tensors on one device; on the CPU, of all tensors."""

    def __init__(self, device: torch.device) -> None:
        self.storages: list[LiveStorage] = []  # in order of allocation
        self.warmup: list[tuple[int | None, int]] = []  # before begin, as in the memory graph
        self.history: list[tuple[int | None, int]] = []  # all the time, by serial numbers
        self.live_bytes: list[int] = []  # after each allocation and free since begin
        self.live_now_bytes = self.resident_bytes = 0
        self.peak_bytes = 0  # since a caller last set this
        self.operation = -1  # index of the latest
        self.node: int | None = None  # index of the one that runs
        self.counts_all = device == _HOST
        self.counts_own = False  # of real tensors those in the memory of torch's allocator
        self.recording = False  # births and deaths belong to the step
        self.warmup_streams: tuple[tuple[int, int], ...] = ()  # as in the memory graph
        self._device = device
        self.is_warming_up = True  # the step has not begun
        self._live: dict[int, int] = {}  # address of the StorageImpl -> index
        self._references: dict[int, weakref.ref[Any]] = {}  # by the same address
        self._others: Any = WeakIdKeyDictionary()  # storages that are not counted
        self._emptied: dict[int, LiveStorage] = {}  # resized to nothing; the last that was there
        self._kept: set[tuple[str, bool, int]] = set()
        self._serials: list[int] = []  # of the storages
        self.streams: dict[int, int] = {}  # by serial number; without the default one
        self._next_serial = 0
        self._deaths = 0
        self._dying: list[int] | None = None  # by address, where they are put in order
        self.lock = threading.RLock()  # threads that a script starts allocate and free as well

    def begin(self) -> None:
        """Starts a step, the first or another; whatever is alive now is resident."""
        alive = sorted(self._live.values())
        renamed = {old: new for new, old in enumerate(alive)}
        self.storages = [self.storages[old] for old in alive]
        self._serials = [self._serials[old] for old in alive]
        self._live = {key: renamed[old] for key, old in self._live.items()}
        for storage in self.storages:
            storage.born, storage.node, storage.saved_by = RESIDENT, None, []
            storage.cast_until = None
            if storage.category is Category.OUTPUT:
                storage.name = f"{storage.name.removesuffix(_EARLIER)}{_EARLIER}"
            elif storage.category in (Category.TEMPORARY, Category.ACTIVATION):
                # A cache that the model keeps, or a tensor that the step before left behind.
                storage.category, storage.name = Category.BUFFER, KEPT
        indices = {serial: index for index, serial in enumerate(self._serials)}
        self.warmup = [
            (None if serial is None else indices.get(serial, ~serial), nbytes)
            for serial, nbytes in self.history
        ]
        gone = self.streams.keys() - indices.keys()
        self.warmup_streams = tuple((~serial, self.streams[serial]) for serial in sorted(gone))
        self.resident_bytes = self.live_now_bytes
        self.live_bytes = []
        self.operation, self.node = 0, None
        self.recording, self.is_warming_up = True, False

    def is_counted(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies on the device."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else None
        return device == self._device or (self.counts_all and device != _META)

    def find(self, tensor: Tensor) -> int:
        """Finds the index of a tensor's storage; NO_STORAGE if it is not watched."""
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:
            return NO_STORAGE
        return self._live.get(key, NO_STORAGE)

    def track(self, tensor: Tensor, born: int | None = None) -> int:
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
        index = self._live.get(storage._cdata)
        if index is not None:
            return index
        if self._others and storage in self._others:
            return NO_STORAGE
        nbytes = storage.nbytes()
        if nbytes == 0:
            return NO_STORAGE
        with self.lock:
            birth, node = (self.operation, self.node) if born is None else (born, None)
            seen = LiveStorage(nbytes, tuple(tensor.shape), strip_torch(tensor.dtype), birth, node)
            index = self._add(storage._cdata, seen)
            self._watch(storage)
            if born == RESIDENT and self.recording:  # there all the time, though seen only now
                self.resident_bytes += nbytes
                self.live_now_bytes += nbytes
                self.peak_bytes += nbytes
                self.live_bytes = [live + nbytes for live in self.live_bytes]
            else:
                self.change(nbytes)
        return index

    def _watch(self, storage: Any) -> None:
        key = storage._cdata
        self._references[key] = weakref.ref(storage, functools.partial(self._see_death, key))

    def hand_over(self, real: Any, fake: Any) -> None:
        """Counts a fake's storage from now on in place of the real one that it stands for."""
        if real._cdata in self._references:
            del self._references[real._cdata]
            self._live[fake._cdata] = self._live.pop(real._cdata)
            self._watch(fake)
        elif self.counts_own and not is_own(real):
            self._others[fake] = True

    def count_other(self, fake: Any) -> None:
        """Counts the storage of a fake, too, whose real one is not of PyTorch's allocator."""
        self._others.pop(fake, None)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage that has been resized: the memory it had is freed, another allocated.

        FSDP2 frees and allocates unsharded parameters so (``free_storage`` in
        ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``), as autograd holds their tensors.
        """
        key = storage._cdata
        if key in self._live:
            self._emptied[key] = self._end(key)
        before = self._emptied.get(key)
        if before is None or not storage.nbytes():
            return
        del self._emptied[key]
        seen = LiveStorage(storage.nbytes(), before.shape, before.dtype, self.operation, self.node)
        seen.category, seen.name = before.category, before.name
        self._add(key, seen)
        self.change(seen.nbytes)

    def find_emptied(self, tensor: Tensor) -> LiveStorage | None:
        """Finds the storage that a tensor had before it was resized to nothing."""
        return self._emptied.get(tensor.untyped_storage()._cdata) if self._emptied else None

    def forget_freed(self) -> None:
        """Forgets what led here, but for the storages that are alive."""
        alive = {self._serials[index] for index in self._live.values()}
        self.history = [event for event in self.history if event[0] in alive]

    def keep(self, kept: Iterable[tuple[str, int]], *, by_engine: bool) -> None:
        """Adds memory that a library takes at its first use in a thread, and never frees.

        The autograd engine's thread has memory of its own, and so has each stream
        (``getCurrentCUDABlasHandle`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``).
        """
        for name, nbytes in kept:
            key = name, by_engine, find_stream()
            if not nbytes or key in self._kept:
                continue
            self._kept.add(key)
            storage = LiveStorage(nbytes, (nbytes,), "uint8", self.operation, self.node)
            storage.category, storage.name = Category.WORKSPACE, name
            self._add(~self._next_serial, storage)  # no address
            self.change(nbytes)

    def empty_cache(self) -> None:
        """Notes that the program gives back what its allocator caches."""
        self.history.append((None, 0))

    def allocate(
        self,
        made: Sequence[Tensor],
        workspace: Workspace,
        kept: Iterable[tuple[str, int]],
        *,
        by_engine: bool,
    ) -> Blocks:
        """Counts an operator's results and its kernel's blocks, in the kernel's order.

        Args:
            made: The results.
            workspace: The blocks.
            kept: What the library behind the kernel takes for good.
            by_engine: Whether autograd's engine runs the operator.

        Returns:
            The blocks, as the memory graph has them.
        """
        keep = functools.partial(self.keep, kept, by_engine=by_engine)
        if isinstance(workspace, int):
            for tensor in made:
                self.track(tensor)
            if self.recording:  # before the workspace, as in the timeline
                keep()
            if workspace:
                serial = self._take_serial() if find_stream() else None
                self.history += [(serial, workspace), (serial, -workspace)]
            if workspace and self.recording:
                self.change(workspace)
                self.change(-workspace)
            if not self.recording:
                keep()
            return ()
        if self.recording:
            keep()
        named = {~block for block, _ in workspace}
        for at, tensor in enumerate(made):
            if at not in named:
                self.track(tensor)
        blocks, held = list[tuple[int, int]](), dict[int, int]()
        for block, nbytes in workspace:
            count = len(self.storages)
            if block < 0:
                self.track(made[~block])
                blocks += [(NEXT_RESULT, 0)] * (len(self.storages) - count)
                continue
            blocks.append((block, nbytes))
            if nbytes > 0:
                held[block] = self._take_serial()
            self.history.append((held[block], nbytes))
            if self.recording:
                self.change(nbytes)
        if not self.recording:
            keep()
        return tuple(blocks)

    def adopt(self, tensor: Tensor, index: int) -> None:
        """Watches the storage of a tensor from now on as the one with an index."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._live[key] = index
        del self._live[~self._serials[index]]
        self._watch(storage)

    def find_serial(self, serial: int) -> int | None:
        """Finds the index of the storage with a serial number of ``history``."""
        at = bisect_left(self._serials, serial)
        return at if self._serials[at : at + 1] == [serial] else None

    def repeat(self, storages: Sequence[LiveStorage], events: Iterable[Event]) -> None:
        """Counts storages that no tensor lies on, and events that happened to others before."""
        keys = {index: key for key, index in self._live.items()}
        others: dict[int, int] = {}
        born = iter(storages)
        for index, nbytes, operation in events:
            serial = index
            if index is not None and index < 0:
                serial = others.get(index)
                if serial is None:
                    serial = others[index] = self._take_serial()
            elif index == len(self.storages):
                serial = self._take_serial()
                self._live[~serial], keys[index] = index, ~serial  # no address
                storage = next(born)
                self.storages.append(replace(storage, saved_by=[*storage.saved_by]))
                self._serials.append(serial)
            elif index is not None:  # a tensor may be held a little longer than it would be
                self._references.pop(keys[index], None)
                del self._live[keys[index]]
                serial, storage = self._serials[index], self.storages[index]
                storage.died = operation
                storage.death_rank = self._deaths = self._deaths + 1
            self.history.append((serial, nbytes))
            self.change(nbytes)

    def release(self, indices: Iterable[int]) -> None:
        """Frees the given storages that are alive and have no tensor."""
        alive = {*self._live.values()}
        sizes = [(index, self.storages[index].nbytes) for index in indices if index in alive]
        self.repeat((), [(index, -nbytes, self.operation) for index, nbytes in sizes])

    def change(self, delta_bytes: int) -> None:
        """Counts an allocation or a free."""
        self.live_now_bytes += delta_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_now_bytes)
        if self.recording:
            self.live_bytes.append(self.live_now_bytes)

    def _add(self, key: int, storage: LiveStorage) -> int:
        index = len(self.storages)
        self.storages.append(storage)
        serial = self._take_serial()
        self._serials.append(serial)
        storage.stream = self.streams.get(serial, 0)
        self._live[key] = index
        self.history.append((serial, storage.nbytes))
        return index

    def _take_serial(self) -> int:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        if stream := find_stream():
            self.streams[serial] = stream
        return serial

    def _see_death(self, key: int, _reference: weakref.ref[Any]) -> None:
        with self.lock:
            del self._references[key]
            self._emptied.pop(key, None)
            if key in self._live and self._dying is not None:
                self._dying.append(key)
            elif key in self._live:
                self._end(key)

    @contextlib.contextmanager
    def order_deaths(self) -> Iterator[None]:
        """Counts storages that die within in the order of birth, as addresses order them anew."""
        with self.lock:
            dying = self._dying = list[int]()
            yield
            self._dying = None
            for key in sorted(dying, key=self._live.__getitem__):
                self._end(key)

    def _end(self, key: int) -> LiveStorage:
        index = self._live.pop(key)
        storage = self.storages[index]
        self.history.append((self._serials[index], -storage.nbytes))
        if self.recording:
            storage.died = self.operation
            storage.death_rank = self._deaths = self._deaths + 1
        self.change(-storage.nbytes)
        return storage


def is_own(storage: torch.UntypedStorage) -> bool:
    """Returns whether torch knows of a storage's memory, unlike NumPy's: it made it or mapped it.

    It cannot resize one that it read from a file, either.
    """
    return storage.resizable() or storage.is_shared()


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
        """Returns whether a node returned a tensor, or the base of which the tensor is a view."""
        if id(tensor) in self._watched:
            return True
        return tensor._is_view() and id(tensor._base) in self._watched

    def _see_end(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        index, _ = self._watched.pop(key)
        if self._ledger.recording:
            self.let_go[index] = self._ledger.operation

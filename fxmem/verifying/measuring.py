"""The peak of a step that really runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.memory.allocator.settings import MIN_BLOCK_BYTES

_SPAN = "span step"


@dataclass
class Allocations:
    """The CPU allocator's events within marked spans, filled when the profiler ends."""

    spans: dict[str, list[int]] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    """By span, the bytes that were allocated since the profiler began and are live at its start."""

    def sum_bytes(self, span: str) -> int:
        """By how much more is live after a span than before it."""
        return sum(self.spans[span])

    def find_peak(self, span: str) -> int:
        """The most that is live within a span, above what was live before it."""
        live = peak = 0
        for nbytes in self.spans[span]:
            live += nbytes
            peak = max(peak, live)
        return peak


@contextmanager
def watch_allocations() -> Iterator[Allocations]:
    """Records the allocations within each ``record_function("span ...")``.

    The profiler does not report the release of what was allocated before it began, but for what an
    earlier one saw at that address (``ProfiledCPUMemoryReporter`` in c10/core/CPUAllocator.cpp);
    that is left out here, so that what is older counts neither way.
    """
    seen = Allocations()
    enabled = gc.isenabled()
    gc.disable()  # what it would free within a span may be older
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            yield seen
    finally:
        if enabled:
            gc.enable()
    spans, memory = [], []
    for event in _iterate_events(prof.profiler.kineto_results.experimental_event_tree()):
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            memory.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith("span "):
            spans.append((event.name, event.start_time_ns, event.end_time_ns))
    memory.sort(key=lambda event: event[0])  # stable: equal times keep the order of recording
    own = [*_skip_older(memory)]
    for name, start, end in spans:
        seen.spans[name] = [nbytes for at, nbytes in own if start <= at <= end]
        seen.before[name] = sum(nbytes for at, nbytes in own if at < start)


def _iterate_events(tree: Iterable[Any]) -> Iterator[Any]:
    waiting = [*tree][::-1]
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(reversed(event.children))


def _skip_older(memory: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Allocations and their releases, each as a time and bytes."""
    live = set()
    for at, address, nbytes in memory:
        if nbytes > 0:
            live.add(address)
        elif address in live:
            live.remove(address)
        else:
            continue
        yield at, nbytes


def sum_storages(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages of tensors on a device, each once, as its allocator rounds them.

    >>> weight = torch.zeros(3)
    >>> sum_storages([weight, weight[1:]], weight.device)
    12
    """
    sizes = [storage.nbytes() for storage in _list_storages(tensors, device)]
    if device.type == "cuda":
        return sum(-(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for nbytes in sizes)
    return sum(sizes)


def measure_peak(
    prepare: Callable[[], object],
    list_held: Callable[[], Iterable[Tensor]],
    step: Callable[[], object],
    release: Callable[[], None],
    device: torch.device,
) -> int:
    """The most bytes that are live in a step, with what is there before it.

    Args:
        prepare: Makes what a step takes.
        list_held: All tensors that are there before it.
        step: What to run, twice: the first replaces what something else may hold on to, as what
            puts a model's attributes back.
        release: Lets go of what the step leaves.
        device: Where it runs.
    """
    gc.collect()
    if device.type == "cuda":
        prepare()
        kept = step()
        del kept
        release()
        prepare()
        resident_bytes = sum_storages(list_held(), device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        release()
        return resident_bytes + peak
    # The profiler knows what was allocated since it began, if only an autograd graph holds it now.
    make_reference: Any = StorageWeakRef
    older = [(make_reference(s), s.nbytes()) for s in _list_storages(list_held(), device)]
    with watch_allocations() as seen:
        # Of what a step keeps for the next, which replaces it, the profiler sees both ends.
        prepare()
        kept = step()
        del kept
        release()
        prepare()
        held = {storage._cdata for storage in _list_storages(list_held(), device)}
        resident_bytes = sum(
            nbytes for storage, nbytes in older if not storage.expired() and storage.cdata in held
        )
        with record_function(_SPAN):
            kept = step()
        del kept
        release()
    return resident_bytes + seen.before[_SPAN] + seen.find_peak(_SPAN)


def _list_storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of tensors on a device, each once."""
    storages = {}
    for tensor in tensors:
        for part in _list_dense(tensor):
            if part.device.type == device.type:
                storage = part.untyped_storage()
                storages[storage._cdata] = storage
    return [*storages.values()]


def _list_dense(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _list_dense(inner)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())

"""The peak of a step that really runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SPAN = "span step"
_BLOCK = 512
"""CUDA's allocator hands out multiples of it."""


@dataclass
class Allocations:
    """The CPU allocator's events within marked spans, filled when the profiler ends."""

    spans: dict[str, list[int]] = field(default_factory=dict)

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

    The profiler does not report the release of what was allocated before it began, so that what
    is resident counts neither way. It takes an address for what it last saw there
    (``ProfiledCPUMemoryReporter`` in c10/core/CPUAllocator.cpp), so that what is allocated here
    should be released here too.
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
    events = prof.profiler.kineto_results.events()
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda event: event[0])  # stable: equal times keep the order of recording
    for event in events:
        if event.name().startswith("span "):
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            seen.spans[event.name()] = [nbytes for at, nbytes in memory if start <= at <= end]


def sum_storages(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages of tensors on a device, each once, as its allocator rounds them.

    >>> weight = torch.zeros(3)
    >>> sum_storages([weight, weight[1:]], weight.device)
    12
    """
    storages = {}
    for tensor in tensors:
        for part in _list_dense(tensor):
            if part.device.type == device.type:
                storage = part.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    if device.type == "cuda":
        return sum(-(-nbytes // _BLOCK) * _BLOCK for nbytes in storages.values())
    return sum(storages.values())


def measure_peak(
    prepare: Callable[[], int],
    step: Callable[[], object],
    release: Callable[[], None],
    device: torch.device,
) -> int:
    """The most bytes that are live in a step, with what is there before it.

    Args:
        prepare: Makes what a step takes, and answers how many bytes are there before it.
        step: What to run; on the CPU twice.
        release: Lets go of what the step leaves.
        device: Where it runs.
    """
    gc.collect()
    if device.type == "cuda":
        resident_bytes = prepare()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        release()
        return resident_bytes + peak
    with watch_allocations() as seen:
        # Of what a step keeps for the next, which replaces it, the profiler sees both ends.
        prepare()
        kept = step()
        del kept
        release()
        resident_bytes = prepare()
        with record_function(_SPAN):
            kept = step()
        del kept
        release()
    return resident_bytes + seen.find_peak(_SPAN)


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

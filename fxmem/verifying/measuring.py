"""Measured peaks of steps that really run."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from fxmem.memory.allocator.settings import MIN_BLOCK_BYTES
from fxmem.verifying.comparing import list_dense_parts
from fxmem.versions.release import is_release

_SPAN = "span step"


@contextlib.contextmanager
def watch_allocations() -> Iterator[dict[str, list[int]]]:
    """Records the CPU allocator's events within each ``record_function("span ...")``, by its name.

    They are there when the context ends: bytes, negative where they are released. Releases of older
    memory are left out: the profiler reports some of them, where an earlier one saw the address
    (``ProfiledCPUMemoryReporter`` in c10/core/CPUAllocator.cpp).
    """
    seen: dict[str, list[int]] = {}
    enabled = gc.isenabled()
    gc.disable()  # what it would free within a span may be older
    try:
        cpu = [ProfilerActivity.CPU]
        # Releases until 2.12 warn of cycles to come, and none does, unless all events are kept.
        keeps = is_release(before=(2, 13))
        with profile(activities=cpu, profile_memory=True, acc_events=keeps) as prof:
            yield seen
    finally:
        if enabled:
            gc.enable()
    spans, memory = [], []
    waiting = [*prof.profiler.kineto_results.experimental_event_tree()][::-1]
    while waiting:
        event = waiting.pop()
        waiting.extend(reversed(event.children))
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            memory.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith("span "):
            spans.append((event.name, event.start_time_ns, event.end_time_ns))
    memory.sort(key=lambda event: event[0])  # stable: equal times keep the order of recording
    live, own = set[int](), []
    for at, address, nbytes in memory:
        if nbytes > 0:
            live.add(address)
        elif address not in live:
            continue  # it is older
        else:
            live.remove(address)
        own.append((at, nbytes))
    for name, start, end in spans:
        seen[name] = [nbytes for at, nbytes in own if start <= at <= end]


def sum_storages(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Sums the bytes of the storages of tensors on a device, each once, as its allocator rounds.

    >>> weight = torch.zeros(3)
    >>> sum_storages([weight, weight[1:]], weight.device)
    12
    """
    parts = [part for tensor in tensors for part in list_dense_parts(tensor)]
    storages = [p.untyped_storage() for p in parts if p.device.type == device.type]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}.values()
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
    """Measures the most bytes that are live in the second run of a step, older ones included.

    Inputs are made by ``prepare``; ``list_held`` lists all tensors that are there before the step,
    and ``release`` frees what the step leaves.
    """
    gc.collect()
    is_cuda = device.type == "cuda"
    with contextlib.nullcontext() if is_cuda else watch_allocations() as seen:
        # On the CPU both steps are watched: of what the second replaces, both ends are seen.
        prepare()
        step()
        release()
        prepare()
        resident_bytes = sum_storages(list_held(), device)
        if is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with record_function(_SPAN):
            kept = step()
        if is_cuda:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        release()
    return resident_bytes + (peak if seen is None else find_peak(seen[_SPAN]))


def find_peak(events: Iterable[int]) -> int:
    """Finds the most that is live within a span, above what was live before it.

    >>> find_peak([8, 4, -8, 2])
    12
    """
    return max(itertools.accumulate(events, initial=0))

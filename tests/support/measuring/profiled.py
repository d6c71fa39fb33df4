"""Peaks of the CPU allocator's own events, as PyTorch's profiler tells them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measure_peaks(run: Callable[[], None], names: Sequence[str]) -> list[int]:
    """The most that is live while each of some marks is open, everything before included.

    Args:
        run: What is measured; all that it allocates is seen, so models are made within.
        names: Of ``torch.profiler.record_function`` in it.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            run()
    finally:
        gc.enable()
    memory, events = list_changes(prof), prof.profiler.kineto_results.events()
    return [_find_peak(memory, next(e for e in events if e.name() == name)) for name in names]


def list_changes(prof: Any) -> list[tuple[int, int]]:
    """Lists when the allocator took or gave back memory, and how many bytes."""
    events = prof.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return sorted(changes, key=lambda change: change[0])


def _find_peak(memory: list[tuple[int, int]], mark: Any) -> int:
    start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    peak = live = sum(nbytes for at, nbytes in memory if at < start)
    for at, nbytes in memory:
        if start <= at <= end:
            live += nbytes
            peak = max(peak, live)
    return peak

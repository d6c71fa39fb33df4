"""Counters of a caching allocator, read while the program that allocates runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory
from fxmem.memory.allocator.heap import Block, DeviceMemory
from fxmem.memory.allocator.settings import AllocatorSettings


class AllocatorMeter:
    """The counters that ``torch.cuda.memory_stats()`` reads.

    As in an analysis, blocks are allocated on a device of unlimited memory; reserved is what a
    limited device reserves until it runs out.

    Args:
        settings: Settings of the allocator.
        memory: A limited device; None for none.

    >>> meter = AllocatorMeter(AllocatorSettings())
    >>> meter.feed([(0, 3_000_000), (0, -3_000_000)], {})
    >>> meter.read()["allocated_bytes"]["all"]
    {'current': 0, 'peak': 3000320, 'allocated': 3000320, 'freed': 3000320}
    >>> meter.read()["reserved_bytes"]["all"]["current"]
    20971520
    """

    def __init__(self, settings: AllocatorSettings, memory: DeviceMemory | None = None) -> None:
        memories = [DeviceMemory()] + ([memory] if memory is not None else [])
        self._allocators = [CachingAllocator(settings, each) for each in memories]
        self._blocks: list[dict[int | None, Block | None]] = [{} for _ in memories]
        self._fed = self._shortages = 0
        self._now: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._allocated: Counter[str] = Counter()

    def feed(self, history: Sequence[tuple[int | None, int]], streams: Mapping[int, int]) -> None:
        """Allocates and frees what was added to a history since it was fed last.

        Args:
            history: Serial numbers of blocks and their bytes, negative where one is freed; 0 bytes
                where the cache is emptied.
            streams: By serial number, the CUDA stream, unless that is the default one.
        """
        for at in range(self._fed, len(history)):
            serial, nbytes = history[at]
            try:
                for allocator, blocks in zip(self._allocators, self._blocks, strict=True):
                    if nbytes > 0:
                        stream = 0 if serial is None else streams.get(serial, 0)
                        blocks[serial] = allocator.allocate(nbytes, stream=stream)
                    elif nbytes:
                        allocator.free(blocks.pop(serial))
                    else:
                        allocator.empty_cache()
            except OutOfMemory:
                self._shortages += 1
                del self._allocators[1:], self._blocks[1:]
            self._count()
        self._fed = len(history)

    def _count(self) -> None:
        unlimited, limited = self._allocators[0], self._allocators[-1]
        for name, nbytes in (
            ("allocated_bytes", unlimited.allocated_bytes),
            ("requested_bytes", unlimited.requested_bytes),
            ("reserved_bytes", limited.reserved_bytes),
            ("allocation", len(self._blocks[0])),
        ):
            self._allocated[name] += max(nbytes - self._now[name], 0)
            self._now[name] = nbytes
            self._peaks[name] = max(self._peaks[name], nbytes)

    def reset_peaks(self) -> None:
        """Sets each peak to what there is."""
        self._peaks = self._now.copy()

    def reset_sums(self) -> None:
        """Sets what was allocated and freed in all to what there is and to nothing."""
        self._allocated = self._now.copy()

    def read(self) -> dict[str, Any]:
        """Reads the counters, nested as ``torch.cuda.memory_stats_as_nested_dict()`` is."""
        counters: dict[str, Any] = {}
        for name in ("allocated_bytes", "requested_bytes", "reserved_bytes", "allocation"):
            now, allocated = self._now[name], self._allocated[name]
            counters[name] = {
                "all": {
                    "current": now,
                    "peak": self._peaks[name],
                    "allocated": allocated,
                    "freed": allocated - now,
                }
            }
        counters["active_bytes"] = counters["allocated_bytes"]
        counters["active"] = counters["allocation"]
        return {
            **counters,
            "num_alloc_retries": self._allocators[-1].retries,
            "num_ooms": self._shortages,
        }

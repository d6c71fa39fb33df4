"""Holds the simulated caching allocator against a memory snapshot that PyTorch wrote on a GPU.

    python -m benchmarks.allocator_trace snapshot.pickle ...

Every allocation and free of the snapshot's trace is run through the simulation, which gets the
addresses of new segments from the trace. Each block has to lie where it lay, each segment has to be
asked for and given back when it was, and in the end the segments have to hold the same blocks.

What was there before the trace began is worked out from its end. One thing does not show: how much
slack a block had that was freed in the trace. Where only that can explain a difference, it is taken
to, and counted in the column *slack*.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxmem.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    DeviceMemory,
    OutOfMemory,
    TraceEvent,
    parse_settings,
)

MIB = 1024**2
SLACK_BYTES = MIB
"""Most that a large block may be larger than its request (`should_split`)."""
TAKEN, GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class PlainUnpickler(pickle.Unpickler):
    """Reads a snapshot, which is made of plain types; anything else may be code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"no memory snapshot: it holds {module}.{name}")


class TraceMemory(DeviceMemory):
    """A device whose addresses are those of a trace.

    Attributes:
        coming: Segments, or pages of them, that the trace has next: address and bytes.
    """

    __slots__ = ("coming",)

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[tuple[int, int]] = []

    def reserve_addresses(self, nbytes: int) -> int:
        return self.coming[0][0] if self.coming else super().reserve_addresses(nbytes)


@dataclass
class Before:
    """What was there before a trace.

    Attributes:
        segments: By address, their bytes, whether they are small, and their stream.
        requests: By address of a live block, what was asked for.
        sizes: By address, the sizes of those blocks, as far as they show.
    """

    segments: dict[int, tuple[int, bool, int]] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


@dataclass
class Result:
    """How far a trace was followed; no difference means to its end."""

    events: int = 0
    segments: int = 0
    slack: int = 0
    reserved_bytes: int = 0
    difference: str = ""


class Difference(Exception):
    """The simulation did something else."""


def read_snapshot(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """The trace of the first device that has one, its segments, and the allocator's settings."""
    snapshot = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    traces = [trace for trace in snapshot["device_traces"] if trace]
    wanted = (*TAKEN, *GIVEN, "alloc", "free_completed")
    trace = [event for event in (traces or [[]])[0] if event["action"] in wanted]
    settings = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    return trace, snapshot["segments"], settings


def rewind(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> Before:
    """Walks a trace back from its end."""
    before = Before()
    for segment in segments:
        at = segment["address"]
        small = segment["segment_type"] == "small"
        if not segment.get("is_expandable", False):  # their traces have to begin with nothing
            before.segments[at] = (segment["total_size"], small, segment["stream"])
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                before.requests[at], before.sizes[at] = block["requested_size"], block["size"]
            at += block["size"]
    for event in reversed(trace):
        address, nbytes = event["addr"], event["size"]
        if event["action"] == "alloc":
            del before.requests[address]
            before.sizes.pop(address, None)
        elif event["action"] == "free_completed":
            before.requests[address] = nbytes
        elif event["action"] == "segment_alloc":
            del before.segments[address]
        elif event["action"] == "segment_free":
            before.segments[address] = (nbytes, nbytes == 2 * MIB, event["stream"])
    return before


def restore(allocator: CachingAllocator, memory: TraceMemory, before: Before) -> dict[int, Block]:
    """Builds what was there before a trace; returns the live blocks by address."""
    heap, blocks = allocator._heap, {}
    addresses = sorted(before.requests)
    for start, (size, small, stream) in before.segments.items():
        end = start + size
        pool = heap.small if small else heap.large
        memory.coming = [(start, size)]
        rest = heap.add_segment(size, stream, pool)
        inside = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
        for address, following in zip(inside, [*inside, end][1:], strict=True):
            if rest is None:
                raise Difference(f"a block at {address:#x} overlaps the one before it")
            if address > rest.address:
                pool_block, rest = rest, rest.split(address - rest.address)
                pool.add(pool_block)
            request = before.requests[address]
            nbytes = before.sizes.get(address, allocator.settings.round_size(request))
            if not small and following - address - nbytes <= SLACK_BYTES:
                nbytes = following - address
            block, rest = rest, rest.split(nbytes) if nbytes < end - address else None
            block.allocated, block.requested_bytes = True, request
            allocator.allocated_bytes += block.size
            allocator.requested_bytes += request
            blocks[address] = block
        if rest is not None:
            pool.add(rest)
    memory.coming = []
    return blocks


def follow(
    trace: list[dict[str, Any]],
    segments: list[dict[str, Any]],
    settings: AllocatorSettings,
    before: Before,
    result: Result,
) -> None:
    """Runs a trace; raises a Difference where the simulation goes another way."""
    memory, seen = TraceMemory(), list[TraceEvent]()
    allocator = CachingAllocator(settings, memory, seen.append)
    blocks = restore(allocator, memory, before)
    result.events = result.segments = 0
    for given, events in groupby(trace, key=lambda event: event["action"] in GIVEN):
        if given:
            seen.clear()
            allocator.empty_cache()
            wanted = {(event["addr"], event["size"]) for event in events}
            if {(event.address, event.nbytes) for event in seen} != wanted:
                raise Difference(f"other segments than those {len(wanted)} are given back")
            continue
        for event in events:
            address, nbytes = event["addr"], event["size"]
            if event["action"] in TAKEN:
                memory.coming.append((address, nbytes))
                continue
            result.events += 1
            if event["action"] == "free_completed":
                allocator.free(blocks.pop(address))
                continue
            seen.clear()
            block = allocator.allocate(nbytes, stream=event["stream"])
            assert block is not None
            blocks[address] = block
            taken = [(one.address, one.nbytes) for one in seen if one.action.value in TAKEN]
            if taken != memory.coming:
                raise Difference(f"segments of {taken} are taken instead of {memory.coming}")
            if block.address != address:
                raise Difference(find_slack(before, address, block.address))
            result.segments += len(taken)
            memory.coming = []
    result.reserved_bytes = allocator.reserved_bytes
    check_end(allocator, segments)


def check_end(allocator: CachingAllocator, segments: list[dict[str, Any]]) -> None:
    """Compares the blocks of all segments with those of the snapshot."""
    found = {
        segment.address: [(block.size, block.allocated) for block in segment.blocks]
        for segment in allocator.snapshot()
    }
    wanted = {
        segment["address"]: [
            (block["size"], block["state"] == "active_allocated") for block in segment["blocks"]
        ]
        for segment in segments
    }
    if found != wanted:
        raise Difference("the segments hold other blocks at the end")


def find_slack(before: Before, address: int, other: int) -> str:
    """Learns the size of a block from before the trace, or says what went wrong."""
    known = [start for start in before.requests if start < address]
    start = max(known, default=address)
    request = before.requests.get(start, 0)
    if start not in before.sizes and 0 < address - start - request <= SLACK_BYTES + 512:
        before.sizes[start] = address - start
        return ""
    return f"a block lies at {other:#x} instead of {address:#x}"


def check(path: Path) -> Result:
    """Follows the trace of a snapshot, again for each slack that it learns of."""
    trace, segments, text = read_snapshot(path)
    before, result, settings = rewind(trace, segments), Result(), parse_settings(text)
    while True:
        try:
            follow(trace, segments, settings, before, result)
        except (Difference, OutOfMemory) as error:
            if not str(error):
                result.slack += 1
                continue
            result.difference = f"after {result.events} events: {error}"
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshots", nargs="+", type=Path, help="files of _dump_snapshot()")
    arguments = parser.parse_args()
    rows, differences = [], 0
    for path in arguments.snapshots:
        result = check(path)
        differences += bool(result.difference)
        rows.append(
            (
                path.name,
                result.events,
                result.segments,
                result.slack,
                result.reserved_bytes // MIB,
                result.difference or "exact",
            )
        )
    headers = ("snapshot", "events", "segments", "slack", "reserved MiB", "result")
    print(tabulate(rows, headers, tablefmt="github"))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

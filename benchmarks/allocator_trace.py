"""Holds the simulated caching allocator against a memory snapshot that PyTorch wrote on a GPU.

    python -m benchmarks.allocator_trace snapshot.pickle ...

A snapshot is a file of ``torch.cuda.memory._dump_snapshot()``, or what this program reads of one as
JSON, compressed by gzip.

Every allocation and free of each device's trace is run through the simulation, which gets the
addresses of new segments from the trace. Each block has to lie where it lay, each segment has to be
asked for and given back when it was, and in the end the segments have to hold the same blocks.
Where memory ran out, the simulated device has as much as was reserved and free at that moment, and
what the allocator gave back before has to follow from that.

What was there before the trace began is worked out from its end. One thing does not show: how much
slack a block had that was freed in the trace. Where only that can explain a difference, it is taken
to, and counted in the column *slack*.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxmem.comparison.snapshot import parse_snapshot
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory
from fxmem.memory.allocator.heap import Block, DeviceMemory, TraceEvent
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings

MIB = 1024**2
SLACK_BYTES = MIB
"""Most that a large block may be larger than its request (`should_split`)."""
TAKEN, GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class TraceMemory(DeviceMemory):
    """A device whose addresses are those of a trace.

    Attributes:
        coming: Segments, or pages of them, that the trace has next: address and bytes.
    """

    __slots__ = ("coming",)

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.coming: list[tuple[int, int]] = []

    def reserve_addresses(self, nbytes: int) -> int:
        return self.coming[0][0] if self.coming else super().reserve_addresses(nbytes)


@dataclass
class Before:
    """The state before a trace.

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
    """The part of a trace that was followed; no difference means to its end."""

    device: int
    events: int = 0
    segments: int = 0
    slack: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    difference: str = ""


class Difference(Exception):
    """The simulation did something else."""


@dataclass(frozen=True)
class DeviceTrace:
    """A snapshot's record of one device.

    Attributes:
        device: Its index.
        events: In order.
        segments: At their end.
    """

    device: int
    events: list[dict[str, Any]]
    segments: list[dict[str, Any]]

    @property
    def capacity_bytes(self) -> int | None:
        """The bytes reserved and free when memory ran out; None where it did not.

        From a trace that begins with nothing.
        """
        reserved = 0
        for event in self.events:
            if event["action"] == "oom":
                return reserved + int(event["device_free"])
            if event["action"] in (*TAKEN, *GIVEN):
                reserved += event["size"] if event["action"] in TAKEN else -event["size"]
        return None


def read_snapshot(path: Path) -> tuple[list[DeviceTrace], str]:
    """The devices of a snapshot that have a trace, and the allocator's settings."""
    if path.suffix == ".gz":
        snapshot = json.loads(gzip.decompress(path.read_bytes()))
    else:
        snapshot = parse_snapshot(path.read_bytes())
    wanted = (*TAKEN, *GIVEN, "alloc", "free_completed", "oom")
    devices = [
        DeviceTrace(
            device,
            [event for event in trace if event["action"] in wanted],
            [segment for segment in snapshot["segments"] if segment["device"] == device],
        )
        for device, trace in enumerate(snapshot["device_traces"])
        if trace
    ]
    settings = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    return devices, settings


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
        address, nbytes = event.get("addr", 0), event["size"]
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
    device: DeviceTrace, settings: AllocatorSettings, before: Before, result: Result
) -> None:
    """Runs a trace; raises a Difference where the simulation goes another way."""
    memory, seen = TraceMemory(device.capacity_bytes), list[TraceEvent]()
    allocator = CachingAllocator(settings, memory, seen.append)
    blocks = restore(allocator, memory, before)
    given: set[tuple[int, int]] = set()
    result.events = result.segments = 0
    result.peak_bytes = allocator.allocated_bytes
    for event in device.events:
        action, address, nbytes = event["action"], event.get("addr", 0), event["size"]
        if action in TAKEN:
            memory.coming.append((address, nbytes))
        elif action in GIVEN:
            given.add((address, nbytes))
        else:
            seen.clear()
            if given and memory.capacity_bytes is None:  # the user's code emptied the cache
                allocator.empty_cache()
            block = _run_event(allocator, blocks, event)
            if find_segments(seen, GIVEN) != given:
                raise Difference(f"other segments than those {len(given)} are given back")
            taken = [(one.address, one.nbytes) for one in seen if one.action.value in TAKEN]
            if taken != memory.coming:
                raise Difference(f"segments of {taken} are taken instead of {memory.coming}")
            if block is not None and block.address != address:
                raise Difference(find_slack(before, address, block.address))
            result.events += 1
            result.segments += len(taken)
            result.peak_bytes = max(result.peak_bytes, allocator.allocated_bytes)
            memory.coming, given = [], set()
    result.reserved_bytes = allocator.reserved_bytes
    check_end(allocator, device.segments)


def _run_event(
    allocator: CachingAllocator, blocks: dict[int, Block], event: dict[str, Any]
) -> Block | None:
    """Allocates, which may fail, or frees; the block that was allocated."""
    if event["action"] == "free_completed":
        allocator.free(blocks.pop(event["addr"]))
        return None
    try:
        block = allocator.allocate(event["size"], stream=event["stream"])
    except OutOfMemory:
        if event["action"] != "oom":
            raise
        return None
    if event["action"] == "oom" or block is None:
        raise Difference("memory does not run out")
    blocks[event["addr"]] = block
    return block


def find_segments(events: list[TraceEvent], actions: tuple[str, ...]) -> set[tuple[int, int]]:
    """Address and bytes of segments of which that is told."""
    return {(event.address, event.nbytes) for event in events if event.action.value in actions}


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


def check(path: Path) -> list[Result]:
    """Follows the trace of each device of a snapshot that has one."""
    devices, text = read_snapshot(path)
    return [check_device(device, parse_settings(text)) for device in devices]


def check_device(device: DeviceTrace, settings: AllocatorSettings) -> Result:
    """Follows the trace of a device, again for each slack that it learns of."""
    before, result = rewind(device.events, device.segments), Result(device.device)
    while True:
        try:
            follow(device, settings, before, result)
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
        for result in check(path):
            differences += bool(result.difference)
            rows.append(
                (
                    path.name,
                    result.device,
                    result.events,
                    result.segments,
                    result.slack,
                    result.reserved_bytes // MIB,
                    result.difference or "exact",
                )
            )
    headers = ("snapshot", "device", "events", "segments", "slack", "reserved MiB", "result")
    print(tabulate(rows, headers, tablefmt="github"))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

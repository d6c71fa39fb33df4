"""Memory snapshots replayed as pytorch.org/memory_viz does it (torch/utils/viz/MemoryViz.js)."""

from __future__ import annotations

import pickletools
from typing import Any

OPCODES = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT"),
    *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1"),
    *("LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""Those of pickle that its unpickler knows."""


def list_opcodes(pickled: bytes) -> set[str]:
    return {opcode.name for opcode, _, _ in pickletools.genops(pickled)}


def replay_forwards(snapshot: dict[str, Any]) -> list[int]:
    """Live bytes after each allocation and free, as the timeline of active memory shows them.

    What has no event was there from the start.
    """
    (trace,) = snapshot["device_traces"]
    sizes: dict[int, int] = {}
    lives, live = [0], 0
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in sizes
            sizes[event["addr"]] = event["size"]
            live += event["size"]
        elif event["action"] == "free_completed":
            assert sizes.pop(event["addr"]) == event["size"]
            live -= event["size"]
        else:
            continue
        lives.append(live)
    blocks = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert blocks == sizes
    return lives


def replay_backwards(snapshot: dict[str, Any]) -> list[tuple[int, int]]:
    """Live and reserved bytes before each event and after all, as the allocator's history does.

    It starts from the last state and undoes one event after the other; every block lies in a
    segment at each moment, and no two overlap.
    """
    (trace,) = snapshot["device_traces"]
    segments = {s["address"]: s["total_size"] for s in snapshot["segments"]}
    blocks: dict[int, int] = {}
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            if block["state"] == "active_allocated":
                blocks[address] = block["requested_size"]
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    states = [_measure(segments, blocks)]
    for event in reversed(trace):
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert blocks.pop(address) == size
        elif event["action"] == "free_completed":
            assert address not in blocks
            blocks[address] = size
        elif event["action"] == "segment_alloc":
            assert segments.pop(address) == size
        elif event["action"] == "segment_free":
            assert address not in segments
            segments[address] = size
        states.append(_measure(segments, blocks))
    return states[::-1]


def _measure(segments: dict[int, int], blocks: dict[int, int]) -> tuple[int, int]:
    places = sorted(segments.items())
    at, end = 0, 0
    for address, size in sorted(blocks.items()):
        assert address >= end
        end = address + size
        while places[at][0] + places[at][1] < end:
            at += 1
        assert places[at][0] <= address
    return sum(blocks.values()), sum(segments.values())

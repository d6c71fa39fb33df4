"""Memory snapshots as PyTorch writes them, of scripts that fxmem runs and of published traces."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

from fxmem.report.snapshot import PROTOCOL, build_snapshot
from fxmem.scripts.script_run import ScriptRun


def join_steps(run: ScriptRun) -> dict[str, Any]:
    """Joins the snapshots of all steps; backward and optimizers have no frames, as on a GPU."""
    parts = [build_snapshot(step) for step in run.steps]
    events = []
    for number, part in enumerate(parts):
        for event in part["device_traces"][0]:
            metadata = event["user_metadata"]
            if event["action"] == "snapshot" or (number and metadata == "before the step"):
                continue
            is_bare = metadata in ("backward", "optimizer")
            events.append({**event, "frames": [] if is_bare else event["frames"]})
    return {"segments": parts[-1]["segments"], "device_traces": [events]}


def read_trace(path: Path) -> dict[str, Any]:
    """Reads a published trace as a snapshot, in which each block has an address of its own."""
    with gzip.open(path, "rt") as file:
        found = json.load(file)
    live: dict[int, list[int]] = defaultdict(list)
    events, blocks, address = [], {}, 0
    for nbytes in found["start_blocks"]:
        blocks[address] = nbytes
        live[nbytes].append(address)
        address += nbytes
    for nbytes, *names in found["events"]:
        action, at = "alloc", address
        if nbytes < 0:
            action, at = "free_completed", live[-nbytes].pop()
            del blocks[at]
        else:
            live[nbytes].append(at)
            blocks[at] = nbytes
            address += nbytes
        line = names[3].rpartition(" ")[0].rpartition(":") if len(names) > 3 else ("", "", "")
        frame = {"filename": line[0], "line": int(line[2] or 0), "name": ""}
        events.append({"action": action, "addr": at, "size": abs(nbytes), "frames": [frame]})
    segments = [
        {"address": at, "total_size": nbytes, "blocks": [
            {"address": at, "size": nbytes, "state": "active_allocated", "frames": []}
        ]}
        for at, nbytes in blocks.items()
    ]  # fmt: skip
    return {"segments": segments, "device_traces": [events]}


def write(snapshot: dict[str, Any]) -> bytes:
    """Writes a snapshot as PyTorch does."""
    return pickle.dumps(snapshot, PROTOCOL)

"""Memory snapshots that PyTorch wrote on a GPU, read as blocks that lived from event to event."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fxmem.errors import UsageError
from fxmem.graph import SourceLocation

_BLOCK_BYTES = 512  # of which the allocator hands out multiples: CUDACachingAllocator.cpp
_TAKEN, _GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_OTHERS = ("/torch/optim/", "/torch/autograd/", "/torch/_tensor.py")
"""Parts of PyTorch that run backward and optimizers: their lines are not those of forward."""
_HINT = "torch.cuda.memory._record_memory_history(), and after some steps _dump_snapshot(path)"


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """A block of a trace.

    Attributes:
        nbytes: Its size, as the allocator rounds it.
        start: The number of its allocation among all of the trace; -1 for one that was there.
        stop: Before which allocation it was freed; None for never.
        source: The innermost line outside of PyTorch that made it; None where none is known.
    """

    nbytes: int
    start: int
    stop: int | None
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trace of a GPU, and its peak.

    Attributes:
        blocks: Those that were there, then those that were allocated, in order.
        peak_bytes: The most bytes that blocks took at once.
        peak_at: The number of the allocation with which they did; -1 for before the first.
        reserved_bytes: The most that the allocator held.
    """

    blocks: tuple[TracedBlock, ...]
    peak_bytes: int
    peak_at: int
    reserved_bytes: int

    @property
    def allocations(self) -> tuple[TracedBlock, ...]:
        """The blocks that were allocated in the trace."""
        return tuple(block for block in self.blocks if block.start >= 0)

    def list_live(self, at: int) -> list[TracedBlock]:
        """Lists the blocks that are alive after an allocation."""
        return [b for b in self.blocks if b.start <= at and (b.stop is None or b.stop > at)]


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain types alone; anything else may be code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def parse_snapshot(data: bytes) -> Mapping[str, Any]:
    """Parses what ``torch.cuda.memory._dump_snapshot`` wrote.

    Raises:
        UsageError: It is no snapshot, or has no trace.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
        traces = found["device_traces"]
    except Exception as error:  # of any file
        raise UsageError("this is not a memory snapshot", hint=_HINT) from error
    if not any(traces):
        raise UsageError("the snapshot has no trace of allocations", hint=_HINT)
    return found  # type: ignore[no-any-return]


def read_snapshot(data: bytes) -> Snapshot:
    """Reads the trace of the GPU with the most events.

    Source of the format: ``torch/csrc/cuda/memory_snapshot.cpp``.

    Raises:
        UsageError: It is no snapshot, or has no trace.
    """
    found = parse_snapshot(data)
    traces = found["device_traces"]
    device = max(range(len(traces)), key=lambda at: len(traces[at]))
    segments = [each for each in found["segments"] if each.get("device", device) == device]
    made: list[dict[str, Any]] = []
    before: list[TracedBlock] = []
    alive: dict[int, int] = {}  # by address, the allocation
    changes: list[tuple[int, int]] = []  # the allocation so far, and the bytes
    held = [0]
    for event in traces[device]:
        action, address, nbytes = event["action"], event["addr"], event["size"]
        if action == "alloc":
            alive[address] = len(made)
            made.append({"nbytes": round_size(nbytes), "source": _find_line(event["frames"])})
            changes.append((len(made) - 1, round_size(nbytes)))
        elif action == "free_completed":
            at, size = alive.pop(address, None), round_size(nbytes)
            if at is None:
                before.append(TracedBlock(size, -1, len(made), None))
            else:
                made[at]["stop"], size = len(made), made[at]["nbytes"]
            changes.append((len(made) - 1, -size))
        elif action in _TAKEN or action in _GIVEN:
            held.append(held[-1] + (nbytes if action in _TAKEN else -nbytes))
    for address, block in _list_blocks(segments):
        if address not in alive:
            source = _find_line(block.get("frames") or [])
            size = round_size(block.get("requested_size", block["size"]))
            before.append(TracedBlock(size, -1, None, source))
    total = sum(segment["total_size"] for segment in segments) - held[-1]
    first = sum(block.nbytes for block in before)
    sums = [first, *accumulate((nbytes for _, nbytes in changes), initial=first)][1:]
    peak_bytes = max(sums)
    at = sums.index(peak_bytes)
    blocks = (TracedBlock(m["nbytes"], n, m.get("stop"), m["source"]) for n, m in enumerate(made))
    return Snapshot(
        blocks=(*before, *blocks),
        peak_bytes=peak_bytes,
        peak_at=changes[at - 1][0] if at else -1,
        reserved_bytes=total + max(held),
    )


def round_size(nbytes: int) -> int:
    """Rounds a size as the allocator does before it looks for a block."""
    return max(-(-nbytes // _BLOCK_BYTES), 1) * _BLOCK_BYTES


def _list_blocks(segments: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Lists the blocks that are allocated in the end, each with its address."""
    found = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.append((block.get("address", address), block))
            address += block["size"]
    return found


def _find_line(frames: Sequence[Mapping[str, Any]]) -> SourceLocation | None:
    """Finds the innermost line of Python outside of PyTorch; None in backward and optimizers."""
    for frame in frames:
        name = frame["filename"].replace("\\", "/")
        if any(folder in name for folder in _OTHERS):
            return None
        if name.endswith(".py") and "/torch/" not in name:
            return SourceLocation(name, frame["line"], frame["name"])
    return None

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fxmem
from benchmarks.allocator_trace import check
from fxmem.memory.allocator.caching import CachingAllocator
from fxmem.memory.allocator.heap import Block, TraceEvent
from fxmem.memory.allocator.settings import parse_settings

MIB = 1024**2


def make_snapshot(settings: str, skipped: int) -> dict[str, Any]:
    """Writes ``torch.cuda.memory._snapshot`` of a run, with its first events forgotten."""
    trace: list[TraceEvent] = []
    allocator = CachingAllocator(parse_settings(settings), trace=trace.append)
    draw, live = random.Random(7), list[Block]()
    for step in range(400):
        if live and draw.random() < 0.45:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            block = allocator.allocate(draw.choice([700, MIB, 3 * MIB + 1, 11 * MIB, 30 * MIB]))
            assert block is not None
            live.append(block)
        if step == 300:
            allocator.empty_cache()
    return {
        "device_traces": [
            [],
            [
                {"action": e.action.value, "addr": e.address, "size": e.nbytes, "stream": e.stream}
                for e in trace[skipped:]
            ],
        ],
        "segments": [
            {
                "device": 1,
                "address": segment.address,
                "total_size": segment.size,
                "segment_type": "small" if segment.is_small else "large",
                "stream": segment.stream,
                "is_expandable": segment.is_expandable,
                "blocks": [
                    {
                        "size": block.size,
                        "requested_size": block.requested_bytes,
                        "state": "active_allocated" if block.allocated else "inactive",
                    }
                    for block in segment.blocks
                ],
            }
            for segment in allocator.snapshot()
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
    }


def write(path: Path, snapshot: dict[str, Any]) -> Path:
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return path


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [("", 0), ("", 200), ("roundup_power2_divisions:4", 150), ("expandable_segments:True", 0)],
)
def test_a_trace_is_followed(settings: str, skipped: int, tmp_path: Path) -> None:
    (result,) = check(write(tmp_path / "snapshot.pickle", make_snapshot(settings, skipped)))
    assert result.difference == ""
    assert result.events > 100 and result.segments > 5


def test_the_snapshot_of_an_analysis_replays_to_its_peak(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten())
    analysis = fxmem.analyze(model, ("8x3x64x64",), optimizer="adam")
    fxmem.render(analysis, tmp_path / "step.pickle")
    snapshot = pickle.loads((tmp_path / "step.pickle").read_bytes())
    # The follower works out by itself what was there before the step.
    (trace,) = snapshot["device_traces"]
    snapshot["device_traces"] = [[e for e in trace if e["user_metadata"] != "before the step"]]
    (result,) = check(write(tmp_path / "trace.pickle", snapshot))
    assert (result.difference, result.events > 20) == ("", True)
    assert result.peak_bytes == analysis.peak_bytes
    assert result.reserved_bytes == analysis.reserved_bytes


def test_expandable_segments_that_were_recorded_are_followed() -> None:
    """Three GPUs in one process; the second had no memory left, gave pages back, and ran out."""
    folder = Path(__file__).parents[2] / "data" / "cuda" / "published" / "snapshots"
    results = check(folder / "expandable_segments.json.gz")
    assert [(r.device, r.events, r.segments, r.difference) for r in results] == [
        (0, 4352, 175, ""),
        (1, 375, 40, ""),
        (2, 598, 78, ""),
    ]


def test_what_the_simulated_allocator_does_otherwise_is_found(tmp_path: Path) -> None:
    snapshot = make_snapshot("", 0)
    blocks = next(s["blocks"] for s in snapshot["segments"] if s["blocks"][-1]["size"] > MIB)
    blocks[-1]["size"] -= 512
    blocks.append({"size": 512, "requested_size": 0, "state": "inactive"})
    (result,) = check(write(tmp_path / "snapshot.pickle", snapshot))
    assert "the segments hold other blocks at the end" in result.difference
    trace = snapshot["device_traces"][1]
    at = next(i for i, e in enumerate(trace) if i > 50 and e["action"] == "alloc")
    of_it = [e for e in trace[at:] if e["addr"] == trace[at]["addr"]]
    for event in of_it[: 1 + [e["action"] for e in of_it].index("free_completed")]:
        event["addr"] += 512
    (result,) = check(write(tmp_path / "snapshot.pickle", snapshot))
    assert result.difference.startswith("after ") and "a block lies at" in result.difference

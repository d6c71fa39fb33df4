"""Snapshots of steps that never ran, read by PyTorch's own tools and by the viewer's rules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hand_made import make_analysis, memory_graphs
from hypothesis import given, settings
from measuring.snapshots import OPCODES, list_opcodes, replay_backwards, replay_forwards
from torch import nn
from torch.cuda import _memory_viz

import fxmem
from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.report.snapshot import build_snapshot, write_snapshot


@pytest.fixture(scope="module")
def steady() -> fxmem.Analysis:
    """A step on CUDA before which there are parameters, states and what the cache kept."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten()
    )
    return fxmem.analyze(model, ("8x3x64x64",), optimizer="adam")


def find_events(snapshot: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [event for event in snapshot["device_traces"][0] if event["action"] == action]


def test_on_cuda_viewers_count_requests_and_the_segments_are_those_reserved(
    steady: fxmem.Analysis,
) -> None:
    snapshot = build_snapshot(steady)
    assert max(replay_forwards(snapshot)) == steady.requested_bytes
    live, reserved = zip(*replay_backwards(snapshot), strict=True)
    assert max(live) == steady.requested_bytes
    assert max(reserved) == steady.reserved_bytes
    assert steady.requested_bytes < steady.peak_bytes < steady.reserved_bytes


@settings(max_examples=30)
@given(memory_graphs())
def test_any_step_replays_in_both_directions(graph: MemoryGraph) -> None:
    for allocator in None, AllocatorSettings():
        analysis = Analysis(make_analysis().setup, graph, allocator)
        timeline = Analysis(analysis.setup, graph).timeline
        peak = max((timeline.resident_bytes, *timeline.live_bytes()))
        snapshot = build_snapshot(analysis)
        assert max(replay_forwards(snapshot)) == peak
        live, reserved = zip(*replay_backwards(snapshot), strict=True)
        assert max(live) == peak
        if allocator is None:
            assert max(reserved) == peak
        elif timeline.events:
            assert max(reserved) == analysis.reserved_bytes


def test_the_file_is_plain_and_of_what_the_viewer_reads(steady: fxmem.Analysis) -> None:
    for analysis in steady, make_analysis():
        pickled = write_snapshot(analysis)
        assert list_opcodes(pickled) <= OPCODES
        assert pickled[:2] == b"\x80\x04"
        assert pickle.loads(pickled) == build_snapshot(analysis)


def test_pytorchs_own_tools_read_it(
    steady: fxmem.Analysis, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, cuda = build_snapshot(make_analysis()), build_snapshot(steady)
    assert "total_allocated: 18.0MiB" in _memory_viz.segsum(cpu)
    assert f"segments: {len(cuda['segments'])}\n" in _memory_viz.segsum(cuda)
    for snapshot in cpu, cuda:
        entries = len(snapshot["device_traces"][0])
        assert f"{entries} entries\n" in _memory_viz.trace(snapshot)
        for plot in _memory_viz.trace_plot, _memory_viz.segment_plot:
            assert "snapshot.pickle" in plot(snapshot)
        lines = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
        total = sum(int(line.rpartition(" ")[2]) for line in lines)
        assert total == sum(segment["total_size"] for segment in snapshot["segments"])
        assert _memory_viz.segments(snapshot, format_flamegraph=str)
        same = snapshot["segments"]
        assert _memory_viz.compare(same, same, format_flamegraph=str) == ""
    capsys.readouterr()
    _memory_viz.filter_alloc_free_pairs(cpu)
    assert capsys.readouterr().out == ""  # each free was requested before it was done
    left = {event["action"] for event in cpu["device_traces"][0]}
    assert left == {"alloc", "segment_alloc", "segment_free", "snapshot"}


def test_the_users_line_comes_first_and_names_the_node() -> None:
    snapshot = build_snapshot(make_analysis())
    (relu,) = [
        event
        for event in find_events(snapshot, "alloc")
        if "aten.relu makes block.relu" in event["frames"][-1]["name"]
    ]
    user, step = relu["frames"]
    assert user == {
        "filename": "/home/me/nets/net.py",
        "line": 12,
        "name": "forward",
        "fx_node_op": "call_function",
        "fx_node_name": "block.relu",
    }
    assert step == {
        "filename": "fxmem",
        "line": 2,
        "name": "forward: aten.relu makes block.relu",
    }
    names = [event["frames"][-1]["name"] for event in find_events(snapshot, "free_completed")]
    assert "forward: fc1 freed after aten.relu" in names
    assert "backward: workspace of aten.threshold_backward" in names


def test_a_saved_report_of_cuda_does_not_say_where_blocks_lie(steady: fxmem.Analysis) -> None:
    saved = Analysis.from_json(steady.to_json())
    with pytest.raises(fxmem.UsageError) as caught:
        write_snapshot(saved)
    assert str(caught.value) == (
        "a saved report lacks the addresses of CUDA's blocks (name the model instead)"
    )
    cpu = make_analysis()
    assert build_snapshot(Analysis.from_json(cpu.to_json())) == build_snapshot(cpu)

"""A step in the Trace Event Format, held against the format's rules and the timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hand_made import MIB, make_analysis, memory_graphs
from hypothesis import given

from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph
from fxmem.memory.allocator import AllocatorSettings
from fxmem.report.trace_events import write_trace

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
}
"""What each kind of event has to have: "Trace Event Format", of Catapult's trace viewer."""


def read(analysis: Analysis) -> list[dict[str, Any]]:
    """The events of a trace, after the rules of the format were checked."""
    trace = json.loads(write_trace(analysis))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}
        assert event.get("ts", 0) >= 0 and event.get("dur", 1) > 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int for value in event["args"].values())
    return events


def find_counters(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [event for event in events if event["ph"] == "C" and event["name"] == name]
    assert all(a["ts"] < b["ts"] for a, b in pairwise(found))  # of two at once one is not shown
    return found


def find_slices(events: list[dict[str, Any]], thread: str) -> list[dict[str, Any]]:
    (number,) = [e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == thread]
    found = [event for event in events if event["ph"] == "X" and event["tid"] == number]
    for a, b in pairwise(found):  # slices of one thread may nest but not overlap
        assert a["ts"] + a["dur"] <= b["ts"] + 1e-4
    return found


@given(memory_graphs())
def test_counters_are_the_timeline_of_any_step(graph: MemoryGraph) -> None:
    analysis = make_analysis(graph)
    events = read(analysis)
    expected = [analysis.timeline.resident_bytes, *analysis.timeline.live_bytes()]
    totals = find_counters(events, "live")
    assert [event["args"]["bytes"] for event in totals] == expected
    if graph.storages:
        parts = find_counters(events, "live by category")
        assert [sum(event["args"].values()) for event in parts] == expected


def test_phases_nodes_and_operations_are_slices() -> None:
    events = read(make_analysis())
    phases = find_slices(events, "phases")
    assert [p["name"] for p in phases] == ["forward", "loss", "backward", "optimizer"]
    nodes = find_slices(events, "nodes")
    assert [(n["cat"], n["name"]) for n in nodes] == [
        ("forward", "fc1"),
        ("forward", "block.relu"),
        ("forward", "fc2"),
        ("loss", "loss.sum"),
        ("backward", "block.relu"),
        ("backward", "fc1"),
    ]
    assert nodes[1]["args"] == {"phase": "forward", "calls": "relu", "source": "net.py:12"}
    operations = find_slices(events, "operations")
    assert len(operations) == 8
    assert operations[5]["name"] == "aten.threshold_backward"
    assert operations[5]["args"] == {"live_bytes": 30 * MIB + 4, "workspace_bytes": 4 * MIB}
    for outer, inner in ((phases[2], operations[5:7]), (nodes[4], operations[5:6])):
        assert outer["ts"] == inner[0]["ts"]
        end = inner[-1]["ts"] + inner[-1]["dur"]
        assert outer["ts"] + outer["dur"] == pytest.approx(end)


def test_operations_take_the_time_of_the_roofline() -> None:
    # The ReLU of 4 MiB reads what it writes: 8 MiB at 40 GB/s of the CPU's roofline.
    relu = find_slices(read(make_analysis()), "operations")[2]
    assert relu["dur"] == pytest.approx(8 * MIB / 40e9 * 1e6, abs=1e-3)
    about = json.loads(write_trace(make_analysis()))["otherData"]
    assert about["time"].startswith("Time is that of the roofline")
    assert about["headline"] == "Peak 30.00 MiB in backward of block.relu, net.py:12"


def test_an_instant_marks_the_peak_within_its_operation() -> None:
    events = read(make_analysis())
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["name"] == "Peak 30.00 MiB in backward of block.relu, net.py:12"
    assert (instant["s"], instant["args"]) == ("g", {"peak_bytes": 30 * MIB + 4})
    operation = find_slices(events, "operations")[5]
    assert operation["ts"] < instant["ts"] < operation["ts"] + operation["dur"]
    (there,) = [e for e in find_counters(events, "live") if e["ts"] == instant["ts"]]
    assert there["args"] == {"bytes": 30 * MIB + 4}


def test_on_cuda_what_is_reserved_is_a_counter_too() -> None:
    plain = make_analysis()
    analysis = Analysis(plain.setup, plain.graph, AllocatorSettings())
    assert analysis.allocation is not None
    reserved = [e["args"]["bytes"] for e in find_counters(read(analysis), "reserved")]
    assert reserved == list(analysis.allocation.reserved_bytes)
    assert find_counters(read(plain), "reserved") == []

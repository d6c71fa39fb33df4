"""A step as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from fxmem.analysis import Analysis
from fxmem.graph import Category, Operation
from fxmem.memory.labels import label_operator
from fxmem.planning.model.costs import find_roofline, price_operations
from fxmem.report.document import build_document
from fxmem.report.text import write_headline, write_source, write_subject

_PHASES, _NODES, _OPERATIONS = 1, 2, 3
_THREADS = {_PHASES: "phases", _NODES: "nodes", _OPERATIONS: "operations"}
_AXIS = (
    "Time is that of the roofline: what each operation takes at least on the target. Allocations "
    "and frees of an operation are spread over it in their order."
)


def write_trace(analysis: Analysis) -> bytes:
    """A step in the Trace Event Format: what is live as counters, what runs as slices.

    Args:
        analysis: Of the step.

    Source of the format: "Trace Event Format", the documentation of Catapult's trace viewer.
    """
    document = build_document(analysis)
    headline = write_headline(document.headline)
    clock = _Clock(analysis)
    trace = {
        "displayTimeUnit": "ns",
        "otherData": {
            "headline": headline,
            "subject": write_subject(document.subject),
            "time": _AXIS,
            "counters": "bytes",
        },
        "traceEvents": [
            *_name_threads(),
            *_list_slices(analysis, clock),
            *_list_counters(analysis, clock, headline),
        ],
    }
    return json.dumps(trace, separators=(",", ":")).encode()


class _Clock:
    """When operations run and events happen, in whole nanoseconds, no two at once."""

    def __init__(self, analysis: Analysis) -> None:
        setup, timeline = analysis.setup, analysis.timeline
        costs_s = price_operations(analysis.graph, find_roofline(setup.device, analysis.gpu))
        counts = [0] * timeline.steps
        for event in timeline.events:
            counts[event.step] += 1
        self.starts_ns = [0]
        for cost_s, count in zip(costs_s, counts, strict=True):
            self.starts_ns.append(self.starts_ns[-1] + max(round(cost_s * 1e9), count + 1))
        self.events_ns: list[int] = []
        for step, count in enumerate(counts):
            start_ns, end_ns = self.starts_ns[step : step + 2]
            for index in range(1, count + 1):
                self.events_ns.append(start_ns + (end_ns - start_ns) * index // (count + 1))


def _name_threads() -> Iterator[dict[str, Any]]:
    yield _describe("process_name", 0, {"name": "fxmem"})
    for thread, name in _THREADS.items():
        yield _describe("thread_name", thread, {"name": name})
        yield _describe("thread_sort_index", thread, {"sort_index": thread})


def _describe(what: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": arguments}


def _list_slices(analysis: Analysis, clock: _Clock) -> Iterator[dict[str, Any]]:
    operations = analysis.graph.operations
    for phase, group in groupby(operations, key=lambda operation: operation.phase):
        yield _slice(phase.value, _PHASES, [*group], clock, {})
    for (phase, node), group in groupby(operations, key=lambda o: (o.phase, o.node)):
        if node is None:
            continue
        record = analysis.nodes[node]
        about = {"phase": phase.value, "calls": record.target}
        if record.source:
            about["source"] = write_source(record.source)
        yield _slice(record.name, _NODES, [*group], clock, about)
    for operation, most in zip(operations, analysis.profile.live_bytes, strict=True):
        about = {"live_bytes": most, "workspace_bytes": operation.workspace_bytes}
        yield _slice(label_operator(operation), _OPERATIONS, [operation], clock, about)


def _slice(
    name: str, thread: int, run: list[Operation], clock: _Clock, about: dict[str, Any]
) -> dict[str, Any]:
    start_ns, end_ns = clock.starts_ns[run[0].index], clock.starts_ns[run[-1].index + 1]
    return {
        "ph": "X",
        "name": name,
        "cat": run[0].phase.value,
        "pid": 1,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": about,
    }


def _list_counters(analysis: Analysis, clock: _Clock, headline: str) -> Iterator[dict[str, Any]]:
    """The live bytes before the first event and after each, and the moment of the peak."""
    storages, events = analysis.allocated_graph.storages, analysis.timeline.events
    present = {storage.category for storage in storages}
    if any(event.storage is None for event in events):
        present.add(Category.WORKSPACE)
    live = {category: 0 for category in Category if category in present}
    for storage in storages:
        if storage.born < 0:
            live[storage.category] += storage.nbytes
    reserved = analysis.allocation and analysis.allocation.reserved_bytes
    is_marked = False
    for at, time_ns in enumerate([0, *clock.events_ns]):
        if at:
            event = events[at - 1]
            category = (
                Category.WORKSPACE if event.storage is None else storages[event.storage].category
            )
            live[category] += event.delta_bytes
            if reserved:
                yield _count("reserved", time_ns, {"bytes": reserved[at - 1]})
        if live:
            yield _count("live by category", time_ns, {c.value: n for c, n in live.items()})
        total = sum(live.values())
        yield _count("live", time_ns, {"bytes": total})
        if total == analysis.peak_bytes and not is_marked:
            is_marked = True
            yield _mark_peak(analysis, time_ns, headline)


def _count(name: str, time_ns: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": time_ns / 1000, "args": values}


def _mark_peak(analysis: Analysis, time_ns: int, headline: str) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": headline,
        "cat": "peak",
        "pid": 1,
        "tid": _OPERATIONS,
        "ts": time_ns / 1000,
        "s": "g",
        "args": {"peak_bytes": analysis.peak_bytes},
    }

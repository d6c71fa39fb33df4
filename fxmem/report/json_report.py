"""Analyses as JSON: the values that a report holds, and a saved report read again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from fxmem.errors import UsageError
from fxmem.finding import Finding
from fxmem.graph import (
    Category,
    Effect,
    MemoryGraph,
    Node,
    Operation,
    Phase,
    SavedTensor,
    SourceLocation,
    Storage,
)
from fxmem.memory.module_tree import SUMS
from fxmem.setup import Loop

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

SCHEMA_VERSION = 2
_Record = TypeVar("_Record")
_PEAKS = (
    *("peak_bytes", "reserved_bytes", "requested_bytes", "fragmentation_bytes"),
    "library_peak_bytes",
)
_TOTALS = (
    *("saved_bytes", "parameter_bytes", "buffer_bytes", "input_bytes", "gradient_bytes"),
    *("optimizer_state_bytes", "forward_flops", "backward_flops"),
)
_MODULE = ("fqn", "class_name", "shape", *SUMS)
_EVENT = ("action", "nbytes", "storage", "step", "phase")
_TYPES: Mapping[str, Callable[[Any], Any]] = {
    "phase": Phase,
    "category": Category,
    "effect": Effect,
    "source": lambda fields: SourceLocation(**fields),
    "loop": lambda fields: Loop(**fields),
}


def list_values(analysis: Analysis) -> dict[str, Any]:
    """Lists all values of an analysis as plain data, as a saved report holds them."""
    peak, graph = analysis.peak, analysis.allocated_graph
    return {
        "schema_version": SCHEMA_VERSION,
        **_list_fields(analysis.setup),
        **{name: getattr(analysis, name) for name in _PEAKS},
        "process_bytes": None if analysis.process_bytes is None else list(analysis.process_bytes),
        "exhaustion": analysis.exhaustion and _list_fields(analysis.exhaustion),
        "fits": analysis.fits,
        "first_step": analysis.first_step and _list_fields(analysis.first_step),
        "peak": {
            "step": peak.step,
            "phase": peak.phase.value,
            "operation": peak.operation.name,
            "node": peak.node.name if peak.node else None,
            "source": peak.source and _list_fields(peak.source),
            "parameters": list(peak.parameters),
            "workspace_bytes": peak.workspace_bytes,
            "live": [storage.index for storage in peak.live],
        },
        "breakdown": {category.value: n for category, n in analysis.breakdown.items()},
        **{name: getattr(analysis, name) for name in _TOTALS},
        "findings": [list_finding(finding) for finding in analysis.findings],
        "nodes": [_list_fields(node) for node in analysis.nodes],
        "modules": [
            {name: _to_plain(getattr(module, name)) for name in _MODULE}
            for module in analysis.modules.walk()
        ],
        "storages": [
            {**_list_fields(storage), "label": label}
            for storage, label in zip(graph.storages, analysis.labels, strict=True)
        ],
        "operations": [_list_fields(operation) for operation in graph.operations],
        "saved": [_list_fields(saved) for saved in analysis.saved],
        "timeline": {
            "resident_bytes": analysis.timeline.resident_bytes,
            "live_bytes": list(analysis.profile.live_bytes),
            "events": [
                {name: _to_plain(getattr(event, name)) for name in _EVENT}
                for event in analysis.timeline.events
            ],
        },
    }


def list_finding(finding: Finding) -> dict[str, Any]:
    """Lists the values of a finding as plain data."""
    return {**_list_fields(finding), "title": finding.title}


def _list_fields(record: Any) -> dict[str, Any]:
    values = asdict(record)
    for name in ("stream", "communication_bytes", "group"):  # the default one; no collective
        if not values.get(name, True):
            del values[name]
    return {name: _to_plain(value) for name, value in values.items()}


def _to_plain(value: Any) -> Any:
    # JSON knows neither tuples nor enums: a reader of the file and one of the dict see the same.
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def read_graph(report: Mapping[str, Any]) -> MemoryGraph:
    """Reads the memory graph of a saved report."""
    return MemoryGraph(
        nodes=tuple(read_record(Node, node) for node in report["nodes"]),
        storages=tuple(read_record(Storage, storage) for storage in report["storages"]),
        operations=tuple(read_record(Operation, each) for each in report["operations"]),
        saved=tuple(read_record(SavedTensor, saved) for saved in report["saved"]),
    )


def parse_report(text: str) -> dict[str, Any]:
    """Parses a saved report into the values that :func:`list_values` lists.

    Raises:
        UsageError: The text is no report, or one of another version.
    """
    try:
        report: dict[str, Any] = json.loads(text)
        version = report["schema_version"]
    except (ValueError, KeyError, TypeError):
        hint = "fxmem analyze --json -o FILE writes one"
        raise UsageError("this is not an fxmem report", hint=hint) from None
    if version != SCHEMA_VERSION:
        cause = f"the report has version {version!r}; this fxmem reads {SCHEMA_VERSION}"
        raise UsageError(cause, hint="write it again with fxmem analyze --json")
    return report


@contextlib.contextmanager
def refuse_damage() -> Iterator[None]:
    """Turns the errors of reading a report that lacks something into one."""
    try:
        yield
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise UsageError(f"the report is damaged: {error}", hint="write it again") from None


def read_record(kind: type[_Record], record: Mapping[str, Any]) -> _Record:
    """Reads one record of a report."""
    # Fields may be added to a report without a new version.
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    values = {name: record[name] for name in record if name in names}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        elif value is not None and name in _TYPES:
            values[name] = _TYPES[name](value)
    return kind(**values)

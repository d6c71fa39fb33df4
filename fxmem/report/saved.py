"""A report that was saved with ``fxmem analyze --json``, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from fxmem.analysis import SCHEMA_VERSION, Analysis, Setup
from fxmem.errors import UsageError
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
from fxmem.loop import Loop

_Record = TypeVar("_Record")
_ENUMS = {"phase": Phase, "category": Category, "effect": Effect}


def read_analysis(text: str) -> Analysis:
    """The analysis of a saved report, as far as a picture of it goes.

    Its sizes are those that the allocator handed out. What it reserved, and what a plan is made
    from, is not in a report: the result serves for drawing alone.

    Args:
        text: What ``fxmem analyze --json`` or ``Analysis.to_json()`` wrote.

    Raises:
        UsageError: The text is no such report, or of a version that this fxmem does not know.
    """
    try:
        report = json.loads(text)
        version = report["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            "this is no report of fxmem", hint="fxmem analyze --json -o FILE writes one"
        ) from None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"a report of version {version!r}; this fxmem reads {SCHEMA_VERSION}",
            hint="make it anew with fxmem analyze --json",
        )
    try:
        graph = MemoryGraph(
            nodes=tuple(_read(Node, node) for node in report["nodes"]),
            storages=tuple(_read(Storage, storage) for storage in report["storages"]),
            operations=tuple(_read(Operation, operation) for operation in report["operations"]),
            saved=tuple(_read(SavedTensor, saved) for saved in report["saved"]),
        )
        return Analysis(_read(Setup, report), graph)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"the report is damaged: {error}", hint="make it anew") from None


def _read(kind: type[_Record], record: Mapping[str, Any]) -> _Record:
    # Fields may be added to a report without a new version.
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _read_value(name, record[name]) for name in names if name in record})


def _read_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if name == "source" and value is not None:
        return SourceLocation(**value)
    if name == "loop":
        return Loop(**value)
    return value if value is None or name not in _ENUMS else _ENUMS[name](value)

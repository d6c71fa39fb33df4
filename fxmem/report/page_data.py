"""What the script of an HTML report reads: a step as columns of numbers and a table of texts.

The names of the fields are short words that the script knows; texts are indices into ``texts``,
which holds each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from fxmem.analysis import Analysis
from fxmem.graph import Category, MemoryGraph, Operation, SourceLocation, Storage
from fxmem.memory.labels import label_operator
from fxmem.planning.outcome import PlannedStep
from fxmem.planning.plan import Plan
from fxmem.report.document import Document
from fxmem.report.module_tree import list_modules
from fxmem.report.tables import escape_controls

NONE = -1
"""Stands for no node, no text, and no operation."""
STACK = (
    *(Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.INPUT),
    *(Category.GRADIENT, Category.ACTIVATION, Category.OUTPUT),
    *(Category.TEMPORARY, Category.WORKSPACE),
)
"""Categories as they lie on each other, from the bottom: what changes least comes first."""


class _Texts:
    """Texts by index, each once, with nothing in them that a reader cannot see."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, text: str | None) -> int:
        if text is None:
            return NONE
        return self._indices.setdefault(escape_controls(text), len(self._indices))

    def list_all(self) -> list[str]:
        return [*self._indices]


def build_page_data(
    analysis: Analysis,
    document: Document,
    planned: PlannedStep | None = None,
    plan: Plan | None = None,
    front: Iterable[Plan] = (),
) -> dict[str, Any]:
    """Everything that the script shows, as what JSON knows.

    Args:
        analysis: Of the step.
        document: Its report.
        planned: The step with the plan, or None.
        plan: The plan, or None.
        front: The trade-offs; may be empty.
    """
    texts, graph = _Texts(), analysis.allocated_graph
    data = {
        "peak": analysis.peak.step,
        "categories": [category.value for category in STACK],
        "phases": [*_list_phases(graph.operations)],
        "operations": _list_operations(graph.operations, texts),
        "nodes": _list_nodes(document, texts),
        "storages": _list_storages(analysis, texts),
        "modules": _list_modules(document, graph, texts),
        "planned": None if planned is None else _describe_planned(planned),
        "front": [_describe_trade(trade) for trade in front],
        "chosen": None if plan is None else _describe_trade(plan),
    }
    return {**data, "texts": texts.list_all()}


def _list_phases(operations: Sequence[Operation]) -> Iterator[tuple[str, int, int]]:
    """The name of each run of one phase, its first operation and the one after its last."""
    for phase, run in groupby(operations, key=lambda operation: operation.phase):
        indices = [operation.index for operation in run]
        yield phase.value, indices[0], indices[-1] + 1


def _list_operations(operations: Sequence[Operation], texts: _Texts) -> dict[str, list[int]]:
    return {
        "name": [texts.add(label_operator(operation)) for operation in operations],
        "node": [NONE if operation.node is None else operation.node for operation in operations],
        "again": [operation.index for operation in operations if operation.recomputed],
        "workspace": [operation.workspace_bytes for operation in operations],
    }


def _list_nodes(document: Document, texts: _Texts) -> dict[str, list[int]]:
    return {
        "name": [texts.add(node.name) for node in document.nodes],
        "target": [texts.add(node.target) for node in document.nodes],
        "source": [_add_source(node.source, texts) for node in document.nodes],
    }


def _list_storages(analysis: Analysis, texts: _Texts) -> dict[str, list[Any]]:
    graph = analysis.allocated_graph
    storages, used = graph.storages, _find_last_uses(graph)
    return {
        "bytes": [storage.nbytes for storage in storages],
        "category": [STACK.index(storage.category) for storage in storages],
        "label": [texts.add(label) for label in analysis.labels],
        "shape": [texts.add(_write_shape(storage)) for storage in storages],
        "dtype": [texts.add(storage.dtype) for storage in storages],
        "born": [storage.born for storage in storages],
        "used": used,
        "died": [NONE if storage.died is None else storage.died for storage in storages],
        "node": [NONE if storage.node is None else storage.node for storage in storages],
        "saved": [list(storage.saved_by) for storage in storages],
    }


def _find_last_uses(graph: MemoryGraph) -> list[int]:
    """The last operation that reads or changes each storage."""
    used = [NONE] * len(graph.storages)
    for operation in graph.operations:
        for index in (*operation.reads, *operation.writes):
            used[index] = operation.index
    return used


def _list_modules(document: Document, graph: MemoryGraph, texts: _Texts) -> list[list[int]]:
    """Rows of the name, the level, the node, and the sums in the order of ``ModuleRow``."""
    rows = []
    for row in list_modules(document.nodes, graph.storages):
        fields = asdict(row)
        name, node = fields.pop("name"), fields.pop("node")
        level = fields.pop("level")
        rows.append([texts.add(name), level, NONE if node is None else node, *fields.values()])
    return rows


def _describe_planned(planned: PlannedStep) -> dict[str, Any]:
    """Which operation each is, those computed again, and what the step then holds."""
    graph = planned.analysis.allocated_graph
    storages = [s for s in graph.storages if s.nbytes]
    return {
        "operation": [index for index, _ in planned.order],
        "again": [place for place, (_, again) in enumerate(planned.order) if again],
        "workspace": [operation.workspace_bytes for operation in graph.operations],
        "bytes": [storage.nbytes for storage in storages],
        "born": [storage.born for storage in storages],
        "died": [NONE if storage.died is None else storage.died for storage in storages],
    }


def _describe_trade(plan: Plan) -> dict[str, Any]:
    return {
        "peak": plan.peak_bytes,
        "overhead": plan.overhead,
        "flops": plan.overhead_flops,
        "segments": len(plan.segments),
    }


def _write_shape(storage: Storage) -> str:
    return "x".join(map(str, storage.shape)) or "scalar"


def _add_source(source: SourceLocation | None, texts: _Texts) -> int:
    return texts.add(None if source is None else f"{source.file}:{source.line}")

"""The data of an HTML report: a step as columns of numbers, and the tree of its modules.

The script of the page reads the fields by their names; texts are indices into ``texts``, which
holds each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from fxmem.graph import Category, Storage
from fxmem.memory.labels import label_operator
from fxmem.memory.module_tree import Module
from fxmem.report.categories import STYLES
from fxmem.report.document import Document, NodeRow
from fxmem.report.tables import escape_controls
from fxmem.report.text import write_shape

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.outcome import PlannedStep
    from fxmem.planning.plan import Plan

NONE = -1  # stands for no node, no text, and no operation
_SUMS = ("output_bytes", "saved_bytes", "live_bytes", "forward_flops", "backward_flops")


class ModuleRow(NamedTuple):
    """A module with all that is in it, or one operation."""

    name: str  # within the row around it; empty for the model itself
    level: int  # of rows that it lies in
    node: int  # index of the node; ``NONE`` for a module of several
    sums: tuple[int, ...]  # bytes of its parameters, then its ``_SUMS``


def build_page_data(
    analysis: Analysis,
    document: Document,
    planned: PlannedStep | None = None,
    plan: Plan | None = None,
    front: Iterable[Plan] = (),
) -> dict[str, Any]:
    """Collects everything that the script shows of a step, as plain data."""
    graph, nodes, texts = analysis.allocated_graph, document.nodes, dict[str, int]()

    def add(text: object | None) -> int:
        return NONE if text is None else texts.setdefault(escape_controls(str(text)), len(texts))

    operations, storages = graph.operations, graph.storages
    found = {storage.category for storage in storages}
    categories = [each for each in STYLES if each in found or each is not Category.COMMUNICATION]
    used = [NONE] * len(storages)
    for operation in operations:
        for index in (*operation.reads, *operation.writes):
            used[index] = operation.index
    phases = []  # the runs of one phase: its name, its first operation, the one after its last
    for phase, run in groupby(operations, key=lambda operation: operation.phase):
        indices = [operation.index for operation in run]
        phases.append((phase.value, indices[0], indices[-1] + 1))
    return {
        "peak": analysis.peak.step,
        "categories": [category.value for category in categories],
        "hatches": [STYLES[category].hatch for category in categories],
        "phases": phases,
        "operations": {
            "name": [add(label_operator(operation)) for operation in operations],
            "node": [_index(operation.node) for operation in operations],
            "workspace": [operation.workspace_bytes for operation in operations],
        },
        "nodes": {
            "name": [add(node.name) for node in nodes],
            "target": [add(node.target) for node in nodes],
            "source": [add((at := node.source) and f"{at.file}:{at.line}") for node in nodes],
        },
        "storages": {
            **_list_lives(storages),
            "category": [categories.index(storage.category) for storage in storages],
            "label": [add(label) for label in analysis.labels],
            "shape": [add(write_shape(storage.shape)) for storage in storages],
            "dtype": [add(storage.dtype) for storage in storages],
            "used": used,
            "node": [_index(storage.node) for storage in storages],
            "saved": [list(storage.saved_by) for storage in storages],
        },
        "modules": [
            [add(row.name), row.level, row.node, *row.sums]
            for row in list_modules(analysis.modules, nodes)
        ],
        "planned": planned
        and {
            "operation": [index for index, _ in planned.order],
            "again": [place for place, (_, again) in enumerate(planned.order) if again],
            "workspace": [o.workspace_bytes for o in planned.analysis.allocated_graph.operations],
            **_list_lives([s for s in planned.analysis.allocated_graph.storages if s.nbytes]),
        },
        "front": [{"peak": each.peak_bytes, "overhead": each.overhead} for each in front],
        "chosen": plan and {"peak": plan.peak_bytes, "overhead": plan.overhead},
        "texts": [*texts],
    }


def _index(index: int | None) -> int:
    return NONE if index is None else index


def _list_lives(storages: Sequence[Storage]) -> dict[str, list[int]]:
    return {
        "bytes": [storage.nbytes for storage in storages],
        "born": [storage.born for storage in storages],
        "died": [_index(storage.died) for storage in storages],
    }


def list_modules(
    module: Module, nodes: Sequence[NodeRow], name: str = "", level: int = 0
) -> Iterator[ModuleRow]:
    """Lists a module, the modules in it and their operations, each before its inside."""

    def sum_up(row: Module | NodeRow) -> tuple[int, ...]:
        return tuple(getattr(row, each) for each in _SUMS)

    sums = (module.parameter_bytes, *sum_up(module))
    is_leaf = len(module.nodes) == 1 and not module.children and level > 0
    if is_leaf and nodes[module.nodes[0]].op == "call_module":
        yield ModuleRow(name, level, module.nodes[0], sums)
        return
    parts = [
        [*list_modules(child, nodes, child.fqn.rpartition(".")[2], level + 1)]
        for child in module.children
    ]
    for index in module.nodes:
        own = nodes[index].name.removeprefix(f"{module.fqn}.") if module.fqn else ""
        row = (own or nodes[index].name, level + 1, index, (0, *sum_up(nodes[index])))
        parts.append([ModuleRow(*row)])
    label = f"{name} ({module.class_name})" if module.class_name else name
    yield ModuleRow(label, level, NONE, sums)
    # Children and operations in the order in which they first ran.
    for rows in sorted(parts, key=lambda rows: min(r.node for r in rows if r.node != NONE)):
        yield from rows

"""Explanations of storages as plain text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import Operation, Phase
from fxmem.memory.explanation import Explanation, explain_storage, find_storages
from fxmem.memory.labels import label_operator
from fxmem.report.document import build_document
from fxmem.report.tables import escape_controls, join_blocks, wrap
from fxmem.report.text import write_headline, write_place, write_shape, write_subject
from fxmem.units import format_bytes

_MOST = 5
_INDENT = 12


def render_explanation(analysis: Analysis, name: str, *, width: int | None = None) -> str:
    """Writes why the storages of a name are alive at the peak.

    Args:
        analysis: The analysed step.
        name: A node, or a storage as the report prints it, shortened by ``...`` or not.
        width: Columns of a line.

    Raises:
        UsageError: Nothing is called so.
    """
    labels = analysis.labels
    pattern = re.compile(re.escape(name).replace(re.escape("..."), ".*"))
    found = [index for index, label in enumerate(labels) if pattern.fullmatch(label)]
    nodes = [node for node in analysis.nodes if pattern.fullmatch(node.name)]
    for node in nodes:
        found += find_storages(analysis.graph, labels, node)
    if not found:
        known = dict.fromkeys([*labels, *(node.name for node in analysis.nodes)])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "fxmem analyze --nodes lists the names"
        raise UsageError(f"no node or storage is called {name!r}", hint=hint)
    graph, step = analysis.allocated_graph, analysis.peak.step
    explained = [explain_storage(graph, index, step) for index in dict.fromkeys(found)]
    explained.sort(key=lambda each: (not each.is_alive, -each.storage.nbytes))
    alive = [each for each in explained if each.is_alive]
    nbytes = format_bytes(sum(each.storage.nbytes for each in alive))
    title = f"{name} holds {nbytes} at the peak" if alive else f"{name} holds nothing at the peak"
    shown = (alive or explained)[:_MOST]
    rest = len(alive or explained) - len(shown)
    headline = write_headline(build_document(analysis).headline)
    return join_blocks(
        [
            f"{escape_controls(title)}\n{headline}\n{wrap(write_subject(analysis.setup), width)}",
            *("\n".join(_write_rows(analysis, each, width)) for each in shown),
            f"... and {rest} more" if rest else "",
        ]
    )


def _write_rows(analysis: Analysis, each: Explanation, width: int | None) -> Iterator[str]:
    storage, nodes = each.storage, analysis.nodes
    operations = analysis.graph.operations

    def locate(operation: Operation) -> str:
        node = None if operation.node is None else nodes[operation.node]
        if operation.phase is Phase.OPTIMIZER:
            return "the optimizer step"
        name, source = (node.name, node.source) if node else (None, None)
        return write_place(operation.phase, name, source)

    tensor = f"{write_shape(storage.shape)}:{storage.dtype}"
    label = analysis.labels[storage.index]
    rows = {
        "storage": f"{label}, {format_bytes(storage.nbytes)}, {storage.category.value}, {tensor}"
    }
    if each.maker is None:
        rows["made"] = "before this step"
    else:
        rows["made by"] = f"{label_operator(each.maker)} in {locate(each.maker)}"
    for at, save in enumerate(each.saves):
        saver = "code outside of nodes" if save.node is None else nodes[save.node].name
        user = None if save.unpacked is None else operations[save.unpacked]
        use = f", for {user.autograd_node}" if user and user.autograd_node else ""
        rows["saved by" if not at else " " * at] = f"{saver}{use}"
    rows["held by"] = each.holder
    if each.let_go is not None and each.maker is not None:
        rows["let go"] = f"by the code in {locate(each.let_go)}"
    rows["freed"] = f"after {locate(each.death)}" if each.death else "not within the step"
    for key, text in rows.items():
        yield wrap(f"{key.strip():{_INDENT}}{text}", width, indent=" " * _INDENT)

"""Explanations of storages as plain text: why each is alive at the peak."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import Phase, Storage
from fxmem.memory.holders import find_holder
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
    graph, labels, step = analysis.allocated_graph, analysis.labels, analysis.peak.step
    pattern = re.compile(re.escape(name).replace(re.escape("..."), ".*"))
    indices = [index for index, label in enumerate(labels) if pattern.fullmatch(label)]
    for node in analysis.nodes:
        if pattern.fullmatch(node.name):  # of a view, the storage that it shares
            indices += node.results
    if not indices:
        known = dict.fromkeys([*labels, *(node.name for node in analysis.nodes)])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "fxmem analyze --nodes lists the names"
        raise UsageError(f"no node or storage is called {name!r}", hint=hint)
    found = [graph.storages[index] for index in dict.fromkeys(indices)]
    alive = [s for s in found if s.born <= step and (s.died is None or s.died >= step)]
    held = format_bytes(sum(s.nbytes for s in alive)) if alive else "nothing"
    shown = sorted(alive or found, key=lambda storage: -storage.nbytes)
    return join_blocks(
        [
            f"{escape_controls(name)} holds {held} at the peak\n"
            f"{write_headline(build_document(analysis).headline)}\n"
            f"{wrap(write_subject(analysis.setup), width)}",
            *("\n".join(_write_rows(analysis, storage, width)) for storage in shown[:_MOST]),
            f"... and {len(shown) - _MOST} more" if len(shown) > _MOST else "",
        ]
    )


def _write_rows(analysis: Analysis, storage: Storage, width: int | None) -> Iterator[str]:
    graph, nodes = analysis.graph, analysis.nodes

    def locate(index: int) -> str:
        operation = graph.operations[index]
        if operation.phase is Phase.OPTIMIZER:
            return "the optimizer step"
        node = None if operation.node is None else nodes[operation.node]
        name, source = (node.name, node.source) if node else (None, None)
        return write_place(operation.phase, name, source)

    label, tensor = analysis.labels[storage.index], f"{write_shape(storage.shape)}:{storage.dtype}"
    size = f"{format_bytes(storage.nbytes)}, {storage.category.value}, {tensor}"
    rows = [("storage", f"{label}, {size}")]
    if storage.born < 0:
        rows.append(("made", "before this step"))
    else:
        operator = label_operator(graph.operations[storage.born])
        rows.append(("made by", f"{operator} in {locate(storage.born)}"))
    for save in (save for save in graph.saves if save.storage == storage.index):
        saver = "code outside of nodes" if save.node is None else nodes[save.node].name
        user = "" if save.unpacked is None else graph.operations[save.unpacked].autograd_node
        key = "" if rows[-1][0] in ("saved by", "") else "saved by"
        rows.append((key, f"{saver}, for {user}" if user else saver))
    rows.append(("held by", find_holder(graph, storage.index, analysis.peak.step)))
    let_go = graph.let_go[storage.index] if graph.let_go else None
    if let_go is not None and storage.born >= 0:
        rows.append(("let go", f"by the code in {locate(let_go)}"))
    freed = "not within the step" if storage.died is None else f"after {locate(storage.died)}"
    for key, text in (*rows, ("freed", freed)):
        yield wrap(f"{key:{_INDENT}}{text}", width, indent=" " * _INDENT)

"""HTML: the interactive page of a step in one file, which loads nothing, and parts of pages.

The data of a page are a step as columns of numbers, and the tree of its modules. The script reads
the fields by their names; texts are indices into ``texts``, which holds each of them once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fxmem.graph import Category, Storage
from fxmem.memory.labels import label_operator
from fxmem.memory.module_tree import Module
from fxmem.report.categories import STYLES
from fxmem.report.document import Document, NodeRow, build_document
from fxmem.report.tables import Table, escape_controls
from fxmem.report.text import (
    list_modules,
    write_first_step,
    write_headline,
    write_range,
    write_shape,
    write_source,
    write_subject,
)
from fxmem.units import format_bytes, format_flops

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.outcome import PlannedStep
    from fxmem.planning.plan import Plan
    from fxmem.report.result import Result


NONE = -1  # stands for no node, no text, and no operation
_SUMS = ("output_bytes", "saved_bytes", "live_bytes", "forward_flops", "backward_flops")
_TEMPLATES = files("fxmem.report") / "templates"
_SCRIPTS = ("base.js", "chart.js", "timeline.js", "tables.js", "plan.js", "main.js")
_DEPTH = 2  # of the modules' table, which is there besides the report
_RARE = (Category.COMMUNICATION, Category.KV_CACHE)  # shown where there are some
_SVG, _TITLE = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}title"


def write_html(
    analysis: Analysis,
    plan: Plan | None = None,
    front: Sequence[Plan] = (),
    svg: bytes = b"",
    graph_note: str = "",
) -> str:
    """Writes the report as one file.

    The file has its own script and style, and a content policy under which nothing else runs and
    nothing is loaded. Names are data: the template escapes them, and the script sets texts only.
    Without the picture of the graph by Graphviz (``svg``), the page has ``graph_note`` instead.
    """
    document, planned = build_document(analysis), None
    # A saved report lacks what it takes to trace a plan.
    if plan is not None and (analysis.graph.saves or not analysis.graph.saved):
        planned = plan.trace(analysis)
    text: str = load_template("report.html").render(
        document=document,
        headline=escape_controls(write_headline(document.headline)),
        subject=escape_controls(write_subject(document.setup)),
        first_step=[*map(escape_controls, write_first_step(document))],
        fit=escape_controls(document.fit),
        plan=plan,
        has_planned=planned is not None,
        plan_notes=[] if plan is None else [*_list_plan_notes(plan, planned, front)],
        front=front,
        graph=Markup(clean_svg(svg)) if svg else "",
        graph_note=graph_note,
        data=Markup(embed_json(build_page_data(analysis, document, planned, plan, front))),
        style=Markup(read_style()),
        style_hash=_hash(read_style()),
        script=Markup(read_script()),
        script_hash=_hash(read_script()),
    )
    return text


def write_fragment(result: Result) -> str:
    """Writes a report as a part of a page: tables, and pictures as far as they can be drawn."""
    blocks = [
        block.drop_empty() if isinstance(block, Table) else block for block in result.list_blocks()
    ]
    step: Any = result  # of which an analysis alone has modules
    modules = getattr(step, "modules", None)
    graph, plots = "", list[str]()
    for view, svg in result.draw_pictures():
        if view == "graph":
            graph = Markup(clean_svg(svg))
        else:  # in a frame of its own: matplotlib's ids and styles are for a whole page
            plots.append(base64.b64encode(svg).decode())
    text: str = load_template("notebook.html").render(
        blocks=[(type(block).__name__, block) for block in blocks],
        modules=modules and list_modules(modules, step.setup.model, _DEPTH).drop_empty(),
        plots=plots,
        graph=graph,
        bars={label: nbytes for label, nbytes in result.list_bars().items() if nbytes},
    )
    return text


def embed_json(data: Any) -> str:
    r"""Writes JSON that ends no script element, whatever its texts are.

    >>> print(embed_json({"name": "</script><b>"}))
    {"name":"\u003c/script\u003e\u003cb\u003e"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def clean_svg(svg: bytes) -> str:
    """Makes a picture of Graphviz part of a page, whose ids and links the page does not share."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    for element in [*root.iter()]:
        if element.tag == f"{{{_SVG}}}a":  # a box with a tooltip is a link to nowhere, titled so
            element.tag = f"{{{_SVG}}}g"
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = element.attrib.pop(_TITLE, "")
            element.insert(0, title)
        for name in ("id", "class"):
            element.attrib.pop(name, None)
    return ElementTree.tostring(root, encoding="unicode")


@cache
def read_style() -> str:
    """Reads the style of every report, and adds the colours of the categories."""
    colors = [f"  --{c.value}: light-dark({s.light}, {s.dark});\n" for c, s in STYLES.items()]
    return f"{_read('report.css')}\n:root {{\n{''.join(colors)}}}\n"


@cache
def read_script() -> str:
    """Reads the script of every report."""
    return f'"use strict";\n(() => {{\n{"".join(map(_read, _SCRIPTS))}}})();\n'


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


@cache
def load_template(name: str) -> Any:
    """Loads a template, which escapes all that is put into it."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": format_bytes,
        "range": lambda row: write_range(row.least_bytes, row.most_bytes),
        "flops": format_flops,
        "share": lambda share: f"{100 * share:.1f} %",
        "clean": escape_controls,
        "source": lambda source: escape_controls(write_source(source)),
    }
    return environment.from_string(_read(name))


def _list_plan_notes(
    plan: Plan, planned: PlannedStep | None, front: Sequence[Plan]
) -> Iterator[str]:
    if plan.inplace:
        calls = ", ".join(f"{change.call} at {change.node}" for change in plan.inplace)
        yield escape_controls(f"Can run in place: {calls}.")
    if plan.dels:
        names = ", ".join(f"{p.variable or p.value} after {p.after}" for p in plan.dels)
        yield escape_controls(f"Freed early: {names}.")
    if planned is None:
        yield (
            "The timeline with the plan is not shown: that takes the model itself, not a saved "
            "report, and a plan made with the same version of fxmem."
        )
    if not front and plan.mode == "train":
        yield "The trade-offs are not shown because they were not computed."


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
    categories = [each for each in STYLES if each in found or each not in _RARE]
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
            for row in list_rows(analysis.modules, nodes)
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


def list_rows(
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
        [*list_rows(child, nodes, child.fqn.rpartition(".")[2], level + 1)]
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

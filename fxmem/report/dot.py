"""A picture of the graph in DOT, the language of Graphviz: boxes only, labels of plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxmem.report.blocks import Kind
from fxmem.report.graph_view import Box, Cluster, Edge, GraphView, Mark, join_names, list_boxes
from fxmem.report.tables import escape_controls, measure_width, shorten
from fxmem.report.text import write_headline, write_source, write_subject
from fxmem.units import format_bytes

_WIDEST = 44
"""Columns of a name in a box."""
_COLUMN_INCHES = 0.09
"""Of a box with letters that are not ASCII, whose widths graphviz-pure does not know."""
_THICKEST = 7.0
"""Points of the largest edge; those of an edge without bytes are 1."""
_MANY_EDGES = 400
_QUICKLY = "nslimit=2, nslimit1=2, mclimit=0.3"
"""Ends Graphviz's search for the best places early: 8 s rather than minutes for DenseNet-201."""

# Told apart with any colour vision, and in grey: Okabe and Ito's vermilion, orange and blue, as
# dark and pale as their text needs.
_PEAK = {
    "shape": "octagon",
    "fillcolor": "#B23A00",
    "color": "#5C1E00",
    "fontcolor": "#FFFFFF",
    "penwidth": "4",
    "fontsize": "13",
    "margin": "0.12,0.08",
}
_LIVE = {"fillcolor": "#FFDA9E", "color": "#8A5A00", "penwidth": "2.4"}
_LIVE_FILLS = ((0.1, "#FFC061"), (0.01, "#FFDA9E"), (0.0, "#FFF1D8"))
"""From which share of the peak on."""
_SAVED = {"shape": "note"}
_ONLY_SAVED = {"fillcolor": "#DCEAF7", "color": "#0B5A94"}
_MODULE = {"peripheries": "2"}
_AGAIN = {"style": "filled,dashed"}

_FONT = 'fontname="Arial"'
_DEFAULTS = f"""\
  graph [{_FONT}, bgcolor="#FFFFFF", color="#B9C0CA", compound=true,
    labelloc=t, labeljust=l, nodesep=0.3, ranksep=0.32, rankdir=TB, charset="UTF-8"]
  node [{_FONT}, fontsize=11, shape=box, style=filled, fillcolor="#FFFFFF", color="#7A828E",
    fontcolor="#16191D", margin="0.11,0.06", height=0.3]
  edge [{_FONT}, fontsize=10, color="#7A828E", fontcolor="#4A515B", arrowsize=0.7]
"""
_CLUSTERS = {
    Kind.MODULE: {
        "fontsize": "11",
        "style": "filled,rounded",
        "fillcolor": "#F4F6F9",
        "color": "#B9C0CA",
    },
    Kind.SEGMENT: {
        "fontsize": "11",
        "style": "filled,dashed",
        "fillcolor": "#F3EAF6",
        "color": "#6B2C83",
        "fontcolor": "#54206A",
        "penwidth": "2",
    },
}


def write_dot(view: GraphView) -> str:
    """A picture as DOT.

    Args:
        view: What it shows.

    Returns:
        The text of a directed graph, which every version of Graphviz draws alike.
    """
    lines = [
        "digraph fxmem {",
        _DEFAULTS.rstrip(),
        f"  graph [fontsize=14, label={_quote(_write_title(view))}]",
    ]
    if len(view.edges) > _MANY_EDGES:
        lines.append(f"  graph [{_QUICKLY}]")
    lines += _write_legend(view)
    for child in view.children:
        lines += _write_item(child, view, "  ")
    lines += [_write_edge(edge) for edge in view.edges]
    return "\n".join([*lines, "}", ""])


def _write_title(view: GraphView) -> list[str]:
    title = [write_headline(view.headline), write_subject(view.subject)]
    if view.planned_peak_bytes is not None:
        peak = format_bytes(view.planned_peak_bytes)
        title.append(f"With the plan, the peak is {peak}; the figures are those without it.")
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in view.breakdown]
    rows = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    return [*title, *(f"Alive at the peak: {row}" for row in rows[:1]), *rows[1:], *view.notes, ""]


def _write_item(item: Cluster | Box, view: GraphView, indent: str) -> Iterator[str]:
    if isinstance(item, Box):
        yield f"{indent}{item.key} {_write_attributes(_describe_box(item, view))}"
        return
    yield f"{indent}subgraph {item.key} {{"
    attributes = {"label": _quote(_label_cluster(item))}
    attributes |= {name: _escape(value) for name, value in _CLUSTERS[item.kind].items()}
    yield f"{indent}  graph {_write_attributes(attributes)}"
    for child in item.children:
        yield from _write_item(child, view, f"{indent}  ")
    yield f"{indent}}}"


def _label_cluster(cluster: Cluster) -> list[str]:
    name = shorten(join_names(cluster.names), _WIDEST)
    if cluster.kind is Kind.SEGMENT:
        name = f"checkpoint {name}"
    copies = f"  x {cluster.copies}, all alike" if cluster.copies > 1 else ""
    lines = [f"{name}{copies}"]
    if cluster.saved_bytes:
        lines.append(f"saves {format_bytes(cluster.saved_bytes)}")
    if cluster.live_bytes:
        lines.append(f"alive at peak {format_bytes(cluster.live_bytes)}")
    return lines


def _describe_box(box: Box, view: GraphView) -> dict[str, str]:
    look: dict[str, str] = {}
    if Mark.SAVED in box.marks:
        look |= _SAVED
    if Mark.LIVE in box.marks:
        share = sum(box.live_bytes) / view.headline.peak_bytes
        look |= _LIVE | {"fillcolor": next(fill for least, fill in _LIVE_FILLS if share >= least)}
    elif Mark.SAVED in box.marks:
        look |= _ONLY_SAVED
    if Mark.AGAIN in box.marks:
        look |= _AGAIN
    if Mark.PEAK in box.marks:
        look |= _PEAK
    if box.is_module and Mark.PEAK not in box.marks:
        look |= _MODULE
    place = write_source(box.source) if box.source else ""
    tooltip = [", ".join(filter(None, [box.name, place]))]
    lines = _label_box(box, view)
    if not all(line.isascii() for line in lines):
        widest = max(measure_width(escape_controls(line)) for line in lines)
        look["width"] = f"{widest * _COLUMN_INCHES:.2f}"
    attributes = {name: _escape(value) for name, value in look.items()}
    label = _quote(lines, end=r"\n" if Mark.PEAK in box.marks else r"\l")
    return {"label": label, "tooltip": _quote(tooltip, end=""), **attributes}


def _label_box(box: Box, view: GraphView) -> list[str]:
    lines = []
    if Mark.PEAK in box.marks:
        where = "" if box.operations == 1 else " within"
        peak = format_bytes(view.headline.peak_bytes)
        lines.append(f"PEAK{where}: {peak} in {view.headline.phase.value}")
    copies = f"  x {box.copies}, all alike" if box.copies > 1 else ""
    lines.append(f"{shorten(box.title, _WIDEST)}{copies}")
    what = "" if _is_told(box) else box.target
    if box.operations > 1:
        what = f"{box.operations} operations"
    tensor = "" if box.shape is None else f"{'x'.join(map(str, box.shape)) or 'scalar'} {box.dtype}"
    lines.append("  ".join(filter(None, [shorten(what, _WIDEST), tensor])))
    figures = []
    if any(box.output_bytes):
        several = "outputs" if box.operations > 1 else "output"
        figures.append(f"{several} {write_amount(box.output_bytes)}")
    if any(box.saved_bytes):
        figures.append(f"saves {write_amount(box.saved_bytes)}")
    lines.append(", ".join(figures))
    if any(box.live_bytes):
        lines.append(f"alive at peak {write_amount(box.live_bytes)}")
    return [*filter(None, lines), *box.notes]


def _is_told(box: Box) -> bool:
    """Whether the name of a box says already what it calls: ``relu_1``."""
    last = box.title.rpartition(".")[2]
    return box.target in (last, last.rstrip("0123456789").rstrip("_"))


def write_amount(nbytes: Sequence[int]) -> str:
    """Bytes of several alike, one by one where they agree.

    >>> write_amount([1024]), write_amount([1024, 0, 1024]), write_amount([1024, 512])
    ('1.00 KiB', '2 x 1.00 KiB', '1.50 KiB in all')
    """
    some = [n for n in nbytes if n]
    if len(some) < 2:
        return format_bytes(sum(some))
    if len(set(some)) == 1:
        return f"{len(some)} x {format_bytes(some[0])}"
    return f"{format_bytes(sum(some))} in all"


def _write_edge(edge: Edge) -> str:
    attributes = {"penwidth": f'"{1 + (_THICKEST - 1) * math.sqrt(edge.share):.1f}"'}
    if any(edge.nbytes):
        # The spaces keep it off a thick line, whose width Graphviz does not heed.
        text = f"{' ' * (1 + round(3 * math.sqrt(edge.share)))}{write_amount(edge.nbytes)}"
        attributes = {"label": _quote([text], end=""), **attributes}
    if edge.is_backward:
        attributes |= {"style": '"dashed"', "constraint": '"false"'}
    return f"  {edge.tail} -> {edge.head} {_write_attributes(attributes)}"


def _write_legend(view: GraphView) -> Iterator[str]:
    """A row of samples above everything."""
    marks = {mark for box in list_boxes(view.children) for mark in box.marks}
    samples = [*_list_samples(marks, view)]
    yield "  subgraph cluster_legend {"
    yield f'    graph [label={_quote(["How to read it"])}, color="#FFFFFF", rank=same]'
    for number, (text, look) in enumerate(samples):
        attributes = {"label": _quote(text)}
        attributes |= {name: _escape(value) for name, value in look.items()}
        yield f"    legend_{number} {_write_attributes(attributes)}"
    for number in range(1, len(samples)):
        yield f'    legend_{number - 1} -> legend_{number} [style="invis", constraint="false"]'
    yield "  }"
    heads = {edge.head for edge in view.edges if not edge.is_backward}
    for box in list_boxes(view.children):
        if box.key not in heads:
            yield f'  legend_{len(samples) // 2} -> {box.key} [style="invis"]'


def _list_samples(
    marks: Iterable[Mark], view: GraphView
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    if Mark.PEAK in marks:
        yield ["PEAK: the step holds most while this runs", "or, in backward, its backward"], _PEAK
    if Mark.LIVE in marks:
        yield (
            [
                "thick border, orange: of it, something",
                "is alive at the peak; the darker, the more",
            ],
            _LIVE,
        )
    if Mark.SAVED in marks:
        yield ["folded corner:", "it saves memory for backward"], {**_SAVED, **_ONLY_SAVED}
    if Mark.AGAIN in marks:
        yield ["dashed border: the plan computes", "it again in backward (checkpoint)"], _AGAIN
    if any(box.is_module for box in list_boxes(view.children)):
        yield ["double border:", "a module, not opened (--depth)"], _MODULE
    yield ["other operations; an arrow is as", "thick as what it hands on is large"], {}
    if any(edge.is_backward for edge in view.edges):
        yield ["dashed arrow: to the next of", "the blocks that are drawn once"], {"shape": "plain"}


def _write_attributes(attributes: Mapping[str, str]) -> str:
    return f"[{', '.join(f'{name}={value}' for name, value in attributes.items())}]"


def _quote(lines: Iterable[str], end: str = r"\l") -> str:
    r"""Lines as a label: nothing in them means anything to Graphviz.

    A quoted string of DOT keeps backslashes, which labels read once more, as they do entities.

    >>> print(_quote(['a "b" <c>', r"\N &lt;"]))
    "a \"b\" <c>\l\\N &amp;lt;\l"
    """
    return f'"{"".join(f"{_escape_text(line)}{end}" for line in lines)}"'


def _escape_text(text: str) -> str:
    text = escape_controls(text).replace("&", "&amp;")
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _escape(value: str) -> str:
    return f'"{value}"'

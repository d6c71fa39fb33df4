"""Pictures of the graph as graphviz.Digraph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path

import graphviz

from fxmem.report.graph.engine import draw_dot
from fxmem.report.graph.tree import Kind
from fxmem.report.graph.view import Box, Cluster, GraphView, join_names, list_boxes
from fxmem.report.tables import escape_controls, shorten
from fxmem.report.text import write_headline, write_peak, write_shape, write_source, write_subject
from fxmem.units import format_bytes

_WIDEST = 44  # columns of a name in a box
_THICKEST = 7.0  # points of the largest edge; an edge without bytes has 1
_MANY_EDGES = 400


def _look(attributes: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in attributes.split())


# Distinct with any colour vision, and in grey: Okabe and Ito's vermilion, orange and blue, as
# dark and pale as their text needs.
_PEAK = _look(
    "shape=octagon fillcolor=#B23A00 color=#5C1E00 fontcolor=#FFFFFF penwidth=4 fontsize=13 "
    "margin=0.12,0.08"
)
_LIVE = _look("fillcolor=#FFDA9E color=#8A5A00 penwidth=2.4")
_LIVE_FILLS = ((0.1, "#FFC061"), (0.01, "#FFDA9E"), (0.0, "#FFF1D8"))
"""From which share of the peak on."""
_SAVED = _look("shape=note")
_ONLY_SAVED = _look("fillcolor=#DCEAF7 color=#0B5A94")
_MODULE = _look("peripheries=2")
_AGAIN = _look("style=filled,dashed")
_GRAPH = _look(
    "fontname=Arial fontsize=14 bgcolor=#FFFFFF color=#B9C0CA compound=true labelloc=t labeljust=l "
    "nodesep=0.3 ranksep=0.32 charset=UTF-8"
)
_NODE = _look(
    "fontname=Arial fontsize=11 shape=box style=filled fillcolor=#FFFFFF color=#7A828E "
    "fontcolor=#16191D margin=0.11,0.06 height=0.3"
)
_EDGE = _look("fontname=Arial fontsize=10 color=#7A828E fontcolor=#4A515B arrowsize=0.7")
_QUICKLY = _look("nslimit=2 nslimit1=2 mclimit=0.3")
"""Ends Graphviz's search for the best places early: 8 s rather than minutes for DenseNet-201."""
_CLUSTERS = {
    Kind.MODULE: _look("fontsize=11 style=filled,rounded fillcolor=#F4F6F9 color=#B9C0CA"),
    Kind.SEGMENT: _look(
        "fontsize=11 style=filled,dashed fillcolor=#F3EAF6 color=#6B2C83 fontcolor=#54206A "
        "penwidth=2"
    ),
}

_SAMPLES: tuple[tuple[str, dict[str, str]], ...] = (
    ("PEAK: the step holds most while this runs\nor, in backward, its backward", _PEAK),
    ("thick border, orange: holds memory\nat the peak; darker means more", _LIVE),
    ("folded corner:\nsaves memory for backward", {**_SAVED, **_ONLY_SAVED}),
    ("dashed border: recomputed\nin backward (checkpoint)", _AGAIN),
    ("double border: a module\nwhose inside is not shown (--depth)", _MODULE),
    ("other operations; a thicker arrow\npasses on more memory", {}),
    ("dashed arrow: to the next of\nthe blocks that are drawn once", {"shape": "plain"}),
)
"""The legend: texts and looks."""


class Picture(graphviz.Digraph):  # type: ignore[misc]
    """A ``graphviz.Digraph`` that draws itself with the system's dot or with graphviz-pure.

    In a notebook it shows itself as SVG.
    """

    def pipe(self, format: str | None = None, *, encoding: str | None = None) -> bytes | str:
        """Draws the graph as ``svg``, ``png`` or ``pdf``; with an ``encoding``, as text."""
        drawn = draw_dot(self.source, format or self.format)
        return drawn if encoding is None else drawn.decode(encoding)

    def render(
        self,
        filename: str | None = None,
        directory: str | None = None,
        *,
        format: str | None = None,
        view: bool = False,
        cleanup: bool = False,
    ) -> str:
        """Saves the source, draws it beside that, and returns the path of the drawing."""
        source: str = self.save(filename, directory=directory)
        path = f"{source}.{format or self.format}"
        Path(path).write_bytes(draw_dot(self.source, format or self.format))
        if cleanup:
            Path(source).unlink()
        if view:
            graphviz.view(path)
        return path


def build_picture(view: GraphView) -> Picture:
    """Builds the picture of a graph: boxes only, with labels of plain text.

    Every version of Graphviz draws these alike, and nothing in a name means anything to it.
    """
    graph = {**_GRAPH, "label": _label(_write_title(view))}
    if len(view.edges) > _MANY_EDGES:
        graph |= _QUICKLY
    picture = Picture("fxmem", format="svg", graph_attr=graph, node_attr=_NODE, edge_attr=_EDGE)
    _add_legend(picture, view)
    for child in view.children:
        _add_item(picture, child, view)
    for edge in view.edges:
        thickness = math.sqrt(edge.share)
        attributes = {"penwidth": f"{1 + (_THICKEST - 1) * thickness:.1f}"}
        if any(edge.nbytes):
            # The spaces keep it off a thick line, whose width Graphviz does not heed.
            attributes["label"] = " " * (1 + round(3 * thickness)) + write_amount(edge.nbytes)
        if edge.is_backward:
            attributes |= {"style": "dashed", "constraint": "false"}
        picture.edge(edge.tail, edge.head, **attributes)
    if not any(box.is_peak for box in list_boxes(view.children)):
        _add_peak(picture, view)
    return picture


def _add_peak(picture: Picture, view: GraphView) -> None:
    """Adds the peak below everything, where none of the nodes runs at the peak: the optimizer."""
    lines = f"PEAK: {write_peak(view.document.headline)}".replace(" in ", "\nin ", 1)
    label = _label(lines.replace(", ", ",\n").split("\n"), end=r"\n")
    picture.node("peak", label=label, **_PEAK)
    tails = {edge.tail for edge in view.edges if not edge.is_backward}
    for box in list_boxes(view.children):
        if box.key not in tails:
            picture.edge(box.key, "peak", style="invis")


def _label(lines: Iterable[str], end: str = r"\l") -> str:
    r"""Joins lines to a label: no backslash or entity in them means anything to Graphviz.

    >>> print(_label(['a "b" <c>', r"\N &lt;"]))
    a "b" <c>\l\\N &amp;lt;\l
    """
    return "".join(f"{_escape(line)}{end}" for line in lines)


def _escape(text: str) -> str:
    escaped: str = graphviz.escape(escape_controls(text).replace("&", "&amp;"))
    return escaped


def _write_title(view: GraphView) -> list[str]:
    document = view.document
    title = [write_headline(document.headline), write_subject(document.setup)]
    if view.planned_peak_bytes is not None:
        peak = format_bytes(view.planned_peak_bytes)
        title.append(f"With the plan, the peak is {peak}; the figures are those without it.")
    parts = [f"{each.value} {format_bytes(n)}" for each, n in document.breakdown.items()]
    rows = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    return [*title, *(f"Alive at the peak: {row}" for row in rows[:1]), *rows[1:], *view.notes, ""]


def _add_item(picture: Picture, item: Cluster | Box, view: GraphView) -> None:
    if isinstance(item, Box):
        picture.node(item.key, **_describe_box(item, view))
        return
    name = shorten(join_names(item.names), _WIDEST)
    title = f"checkpoint {name}" if item.kind is Kind.SEGMENT else name
    boxes = [*list_boxes(item.children)]
    lines = [f"{title}{_count_copies(item.copies)}"]
    for kind, what in ("saved", "saves"), ("live", "alive at peak"):
        nbytes = sum(sum(box.list_bytes(kind)) for box in boxes)
        lines += [f"{what} {format_bytes(nbytes)}"] if nbytes else []
    attributes = {**_CLUSTERS[item.kind], "label": _label(lines)}
    with picture.subgraph(name=item.key, graph_attr=attributes) as cluster:
        for child in item.children:
            _add_item(cluster, child, view)


def _count_copies(copies: int) -> str:
    return f"  x {copies}, all alike" if copies > 1 else ""


def _describe_box(box: Box, view: GraphView) -> dict[str, str]:
    live_bytes, is_saved = sum(box.list_bytes("live")), any(box.list_bytes("saved"))
    look = {**_SAVED} if is_saved else {}
    if live_bytes:
        share = live_bytes / view.document.headline.peak_bytes
        look |= _LIVE | {"fillcolor": next(fill for least, fill in _LIVE_FILLS if share >= least)}
    elif is_saved:
        look |= _ONLY_SAVED
    look |= _AGAIN if box.is_again else {}
    look |= _PEAK if box.is_peak else _MODULE if box.is_module else {}
    label = _label(_label_box(box, view), end=r"\n" if box.is_peak else r"\l")
    source = box.rows[0][0].source if len(box.rows[0]) == 1 else None
    place = ", ".join(filter(None, [box.name, write_source(source)]))
    return {"label": label, "tooltip": _escape(place), **look}


def _label_box(box: Box, view: GraphView) -> Iterator[str]:
    row, operations = box.rows[0][0], len(box.rows[0])
    if box.is_peak:
        where = "" if operations == 1 else " within"
        peak = format_bytes(view.document.headline.peak_bytes)
        yield f"PEAK{where}: {peak} in {view.document.headline.phase.value}"
    yield f"{shorten(box.title, _WIDEST)}{_count_copies(box.copies)}"
    what = f"{operations} operations"
    if operations == 1:  # the name of most has what they call in it: ``relu_1``
        last = box.title.rpartition(".")[2]
        is_said = row.target in (last, last.rstrip("0123456789").rstrip("_"))
        what = "" if is_said else shorten(row.target, _WIDEST)
    shaped = next((r for r in reversed(box.rows[0]) if r.shape is not None), row)
    tensor = "" if shaped.shape is None else f"{write_shape(shaped.shape)} {shaped.dtype}"
    sizes = (("output", "outputs" if operations > 1 else "output"), ("saved", "saves"))
    amounts = [(verb, box.list_bytes(kind)) for kind, verb in sizes]
    yield from filter(
        None,
        (
            "  ".join(filter(None, [what, tensor])),
            ", ".join(f"{verb} {write_amount(nbytes)}" for verb, nbytes in amounts if any(nbytes)),
        ),
    )
    if any(box.list_bytes("live")):
        yield f"alive at peak {write_amount(box.list_bytes('live'))}"
    yield from box.notes


def write_amount(nbytes: Sequence[int]) -> str:
    """Writes the bytes of several alike, one by one where they agree.

    >>> write_amount([1024]), write_amount([1024, 0, 1024]), write_amount([1024, 512])
    ('1.00 KiB', '2 x 1.00 KiB', '1.50 KiB in all')
    """
    some = [n for n in nbytes if n]
    if len(some) < 2:
        return format_bytes(sum(some))
    if len(set(some)) == 1:
        return f"{len(some)} x {format_bytes(some[0])}"
    return f"{format_bytes(sum(some))} in all"


def _add_legend(picture: Picture, view: GraphView) -> None:
    """Adds a row of samples above everything, of the looks that the picture has."""
    boxes = [*list_boxes(view.children)]
    is_there = (
        True,
        any(any(box.list_bytes("live")) for box in boxes),
        any(any(box.list_bytes("saved")) for box in boxes),
        any(box.is_again for box in boxes),
        any(box.is_module for box in boxes),
        True,
        any(edge.is_backward for edge in view.edges),
    )
    shown = [*compress(_SAMPLES, is_there)]
    attributes = {"label": _label(["How to read it"]), "color": "#FFFFFF", "rank": "same"}
    with picture.subgraph(name="cluster_legend", graph_attr=attributes) as legend:
        for number, (lines, look) in enumerate(shown):
            legend.node(f"legend_{number}", label=_label(lines.split("\n")), **look)
        for number in range(1, len(shown)):
            ends = f"legend_{number - 1}", f"legend_{number}"
            legend.edge(*ends, style="invis", constraint="false")
    heads = {edge.head for edge in view.edges if not edge.is_backward}
    for box in boxes:
        if box.key not in heads:
            picture.edge(f"legend_{len(shown) // 2}", box.key, style="invis")

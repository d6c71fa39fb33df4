"""Pictures of the graph as graphviz.Digraph, and the programs that draw them."""

from __future__ import annotations

import html
import math
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence

import graphviz

from fxmem.errors import UsageError
from fxmem.report.graph.tree import Kind
from fxmem.report.graph.view import Box, Cluster, Edge, GraphView, Mark, join_names, list_boxes
from fxmem.report.tables import escape_controls, measure_width, shorten
from fxmem.report.text import write_headline, write_shape, write_source, write_subject
from fxmem.units import format_bytes

TIME_LIMIT_S = 120
_PURE, _PURE_FORMATS = "graphviz-pure", ("svg", "png")
_HINT = "pip install graphviz-pure, or write the graph itself: -o FILE.dot"

_WIDEST = 44
"""Columns of a name in a box."""
_COLUMN_INCHES = 0.09
"""Of a box with letters that are not ASCII, whose widths graphviz-pure does not know."""
_THICKEST = 7.0
"""Points of the largest edge; those of an edge without bytes are 1."""
_MANY_EDGES = 400


def _look(attributes: str) -> dict[str, str]:
    """Reads attributes of DOT, separated by spaces."""
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

_FONTS = "Arial, Liberation Sans, Helvetica, sans-serif"
_ARIAL = {
    **dict.fromkeys("ijl'", 0.222),
    **dict.fromkeys(" !,./:;I[\\]ft", 0.278),
    **dict.fromkeys("()-`r{}", 0.333),
    **dict.fromkeys("Jcksvxyz", 0.5),
    **dict.fromkeys("+<=>~", 0.584),
    **dict.fromkeys("FTZ", 0.611),
    **dict.fromkeys("&ABEKPSVXY", 0.667),
    **dict.fromkeys("CDHNRUw", 0.722),
    **dict.fromkeys("GOQ", 0.778),
    **dict.fromkeys("Mm", 0.833),
    "|": 0.26,
    '"': 0.355,
    "*": 0.389,
    "^": 0.469,
    "%": 0.889,
    "W": 0.944,
    "@": 1.015,
}
"""Widths of letters in the font that Graphviz lays out with, in em; those not named, 0.556."""
_SVG_TEXT = re.compile(
    r'<text(?P<look>[^>]* font-size="(?P<size>[\d.]+)"[^>]*)>(?P<text>[^<]*)</text>'
)


class Picture(graphviz.Digraph):  # type: ignore[misc]
    """A ``graphviz.Digraph`` that draws itself with the system's dot or with graphviz-pure.

    In a notebook it shows itself as SVG.
    """

    def pipe(self, format: str | None = None, *, encoding: str | None = None) -> bytes | str:
        """Draws the graph.

        Args:
            format: ``svg``, ``png``, or with the system's Graphviz ``pdf``.
            encoding: The encoding of the text to return; None for bytes.

        Raises:
            UsageError: No program that draws this is installed, it fails, or it takes too long.
        """
        drawn = draw_dot(self.source, format or self.format)
        return drawn if encoding is None else drawn.decode(encoding)

    def render(
        self,
        filename: str | None = None,
        directory: str | None = None,
        *,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
    ) -> str:
        """Saves the source to a file, draws it beside that, and returns the picture's path.

        The arguments are those of ``graphviz.Digraph.render``, the errors those of :meth:`pipe`.
        """
        source: str = self.save(filename, directory=directory)
        path = f"{source}.{format or self.format}"
        with open(path, "wb") as file:
            file.write(draw_dot(self.source, format or self.format))
        if cleanup:
            os.remove(source)
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
        _add_edge(picture, edge)
    return picture


def _label(lines: Iterable[str], end: str = r"\l") -> str:
    r"""Joins lines to a label: nothing in them means anything to Graphviz.

    Labels read backslashes and entities.

    >>> print(_label(['a "b" <c>', r"\N &lt;"]))
    a "b" <c>\l\\N &amp;lt;\l
    """
    return "".join(f"{_escape(line)}{end}" for line in lines)


def _escape(text: str) -> str:
    escaped: str = graphviz.escape(escape_controls(text).replace("&", "&amp;"))
    return escaped


def _write_title(view: GraphView) -> list[str]:
    document = view.document
    title = [write_headline(document.headline), write_subject(document.subject)]
    if view.planned_peak_bytes is not None:
        peak = format_bytes(view.planned_peak_bytes)
        title.append(f"With the plan, the peak is {peak}; the figures are those without it.")
    parts = [f"{row.category.value} {format_bytes(row.nbytes)}" for row in document.breakdown]
    rows = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    return [*title, *(f"Alive at the peak: {row}" for row in rows[:1]), *rows[1:], *view.notes, ""]


def _add_item(picture: Picture, item: Cluster | Box, view: GraphView) -> None:
    if isinstance(item, Box):
        picture.node(item.key, **_describe_box(item, view))
        return
    attributes = {**_CLUSTERS[item.kind], "label": _label(_label_cluster(item))}
    with picture.subgraph(name=item.key, graph_attr=attributes) as cluster:
        for child in item.children:
            _add_item(cluster, child, view)


def _label_cluster(cluster: Cluster) -> list[str]:
    name = shorten(join_names(cluster.names), _WIDEST)
    if cluster.kind is Kind.SEGMENT:
        name = f"checkpoint {name}"
    lines = [f"{name}{_count_copies(cluster.copies)}"]
    if cluster.saved_bytes:
        lines.append(f"saves {format_bytes(cluster.saved_bytes)}")
    if cluster.live_bytes:
        lines.append(f"alive at peak {format_bytes(cluster.live_bytes)}")
    return lines


def _count_copies(copies: int) -> str:
    return f"  x {copies}, all alike" if copies > 1 else ""


def _describe_box(box: Box, view: GraphView) -> dict[str, str]:
    look: dict[str, str] = {}
    if Mark.SAVED in box.marks:
        look |= _SAVED
    if Mark.LIVE in box.marks:
        share = sum(box.live_bytes) / view.document.headline.peak_bytes
        look |= _LIVE | {"fillcolor": next(fill for least, fill in _LIVE_FILLS if share >= least)}
    elif Mark.SAVED in box.marks:
        look |= _ONLY_SAVED
    if Mark.AGAIN in box.marks:
        look |= _AGAIN
    if Mark.PEAK in box.marks:
        look |= _PEAK
    elif box.is_module:
        look |= _MODULE
    lines = _label_box(box, view)
    if not all(line.isascii() for line in lines):
        widest = max(measure_width(escape_controls(line)) for line in lines)
        look["width"] = f"{widest * _COLUMN_INCHES:.2f}"
    label = _label(lines, end=r"\n" if Mark.PEAK in box.marks else r"\l")
    place = ", ".join(filter(None, [box.name, write_source(box.source)]))
    return {"label": label, "tooltip": _escape(place), **look}


def _label_box(box: Box, view: GraphView) -> list[str]:
    lines = []
    if Mark.PEAK in box.marks:
        where = "" if box.operations == 1 else " within"
        peak = format_bytes(view.document.headline.peak_bytes)
        lines.append(f"PEAK{where}: {peak} in {view.document.headline.phase.value}")
    lines.append(f"{shorten(box.title, _WIDEST)}{_count_copies(box.copies)}")
    last = box.title.rpartition(".")[2]
    # The name of most boxes has what they call in it: ``relu_1``.
    what = "" if box.target in (last, last.rstrip("0123456789").rstrip("_")) else box.target
    if box.operations > 1:
        what = f"{box.operations} operations"
    tensor = "" if box.shape is None else f"{write_shape(box.shape)} {box.dtype}"
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


def _add_edge(picture: Picture, edge: Edge) -> None:
    thickness = math.sqrt(edge.share)
    attributes = {"penwidth": f"{1 + (_THICKEST - 1) * thickness:.1f}"}
    if any(edge.nbytes):
        # The spaces keep it off a thick line, whose width Graphviz does not heed.
        attributes["label"] = " " * (1 + round(3 * thickness)) + write_amount(edge.nbytes)
    if edge.is_backward:
        attributes |= {"style": "dashed", "constraint": "false"}
    picture.edge(edge.tail, edge.head, **attributes)


def _add_legend(picture: Picture, view: GraphView) -> None:
    """Adds a row of samples above everything."""
    boxes = [*list_boxes(view.children)]
    samples = [*_list_samples({mark for box in boxes for mark in box.marks}, boxes, view)]
    attributes = {"label": _label(["How to read it"]), "color": "#FFFFFF", "rank": "same"}
    with picture.subgraph(name="cluster_legend", graph_attr=attributes) as legend:
        for number, (text, look) in enumerate(samples):
            legend.node(f"legend_{number}", label=_label(text), **look)
        for number in range(1, len(samples)):
            ends = f"legend_{number - 1}", f"legend_{number}"
            legend.edge(*ends, style="invis", constraint="false")
    heads = {edge.head for edge in view.edges if not edge.is_backward}
    for box in boxes:
        if box.key not in heads:
            picture.edge(f"legend_{len(samples) // 2}", box.key, style="invis")


def _list_samples(
    marks: Iterable[Mark], boxes: Iterable[Box], view: GraphView
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    if Mark.PEAK in marks:
        yield ["PEAK: the step holds most while this runs", "or, in backward, its backward"], _PEAK
    if Mark.LIVE in marks:
        yield ["thick border, orange: holds memory", "at the peak; darker means more"], _LIVE
    if Mark.SAVED in marks:
        yield ["folded corner:", "saves memory for backward"], {**_SAVED, **_ONLY_SAVED}
    if Mark.AGAIN in marks:
        yield ["dashed border: recomputed", "in backward (checkpoint)"], _AGAIN
    if any(box.is_module for box in boxes):
        yield ["double border: a module", "whose inside is not shown (--depth)"], _MODULE
    yield ["other operations; a thicker arrow", "passes on more memory"], {}
    if any(edge.is_backward for edge in view.edges):
        yield ["dashed arrow: to the next of", "the blocks that are drawn once"], {"shape": "plain"}


def draw_dot(dot: str, kind: str) -> bytes:
    """Draws a graph in DOT with the program that :func:`find_engine` finds.

    Args:
        dot: The graph.
        kind: ``svg``, ``png`` or ``pdf``.

    Raises:
        UsageError: There is no Graphviz that draws this, or it fails, or it takes too long.
    """
    engine = find_engine(kind)
    try:
        result = subprocess.run(
            [engine, f"-T{kind}"],
            input=dot.encode(),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Graphviz did not lay out the graph within {TIME_LIMIT_S} seconds",
            hint="draw less of it: --depth 2",
        ) from None
    except OSError as error:
        raise UsageError(f"{engine} does not start: {error.strerror}", hint=_HINT) from error
    if result.returncode or not result.stdout:
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit code {result.returncode}"
        raise UsageError(f"{engine} fails: {cause}", hint="write the graph itself: -o FILE.dot")
    return fit_texts(result.stdout) if kind == "svg" else result.stdout


def find_engine(kind: str) -> str:
    """Finds the program that draws a format: the system's dot, else graphviz-pure.

    Args:
        kind: ``svg``, ``png`` or ``pdf``.

    Raises:
        UsageError: There is none.
    """
    found, hint = shutil.which("dot"), "apt install graphviz, or draw an .svg"
    if found is None and kind in _PURE_FORMATS:
        # It lies beside Python, which need not be on the path where its environment is not active.
        beside = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        found, hint = shutil.which(_PURE, path=beside), _HINT
    if found is None:
        raise UsageError(f"no Graphviz that draws {kind} is installed", hint=hint)
    return found


def fit_texts(svg: bytes) -> bytes:
    """Gives the texts of an SVG the lengths that Graphviz laid them out with.

    A viewer without Arial takes another font, whose letters may be wider than the box.
    """

    def fit(match: re.Match[str]) -> str:
        text = html.unescape(match["text"]).replace("\xa0", " ")
        em = sum(_ARIAL.get(c, 0.556) if c.isascii() else 0.556 * measure_width(c) for c in text)
        length = f'textLength="{em * float(match["size"]):.2f}" lengthAdjust="spacingAndGlyphs"'
        return f"<text{match['look']} {length}>{match['text']}</text>" if em else match[0]

    texts = re.compile(
        r'<text(?P<look>[^>]* font-size="(?P<size>[\d.]+)"[^>]*)>(?P<text>[^<]*)</text>'
    )
    drawn = texts.sub(fit, svg.decode())
    return drawn.replace('font-family="Arial"', f'font-family="{_FONTS}"').encode()

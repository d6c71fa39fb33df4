"""The formats in which an analysis can be drawn, by their suffixes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.plan import Plan
from fxmem.report.cutting import Detail
from fxmem.report.document import build_document
from fxmem.report.dot import write_dot
from fxmem.report.engines import draw_dot, find_engine
from fxmem.report.graph_view import build_view
from fxmem.report.overlay import NO_OVERLAY, lay_plan

GRAPH = "graph"
"""The view that Graphviz draws, where a format needs it at all."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How to draw.

    Attributes:
        view: What of the analysis: one of the format's views; None for its first.
        detail: How much of the graph.
        plan: What to lay over it, or None.
        front: The step's trade-offs, as :func:`fxmem.pareto` has them; empty where they were not
            worked out.
    """

    view: str | None = None
    detail: Detail = field(default_factory=Detail)
    plan: Plan | None = None
    front: tuple[Plan, ...] = ()


def choose_options(
    view: str | None,
    depth: int | None,
    expand: bool,
    plan: Plan | None = None,
    front: Iterable[Plan] = (),
) -> RenderOptions:
    """How to draw, as it was asked for.

    Raises:
        UsageError: There is no such depth.
    """
    if depth is not None and depth < 1:
        raise UsageError(f"a depth of {depth} shows nothing", hint="1 or more")
    return RenderOptions(view, Detail(depth, expand), plan, tuple(front))


Renderer = Callable[[Analysis, RenderOptions], bytes]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file.

    Attributes:
        suffixes: Of its files, in lower case, the usual one first.
        views: What draws it, by the view; the first is the default.
        is_text: Whether a terminal can show it.
        needs_engine: Whether Graphviz draws its graph.
    """

    suffixes: tuple[str, ...]
    views: Mapping[str, Renderer]
    is_text: bool = False
    needs_engine: bool = False


def render_dot(analysis: Analysis, options: RenderOptions) -> str:
    """The graph in DOT.

    Raises:
        UsageError: The plan is for another model, or other inputs.
    """
    document = build_document(analysis)
    plan, overlay = options.plan, NO_OVERLAY
    if plan is not None:
        if fingerprint_graph(analysis.graph) != plan.fingerprint:
            raise UsageError(
                "the plan was made for another model or other inputs",
                hint="make it anew with fxmem plan -o",
            )
        overlay = lay_plan(plan, document.nodes)
    return write_dot(build_view(document, overlay, options.detail))


def _render_dot(analysis: Analysis, options: RenderOptions) -> bytes:
    return render_dot(analysis, options).encode()


def _draw_graph(kind: str, analysis: Analysis, options: RenderOptions) -> bytes:
    return draw_dot(render_dot(analysis, options), kind)


FORMATS: Mapping[str, Format] = {
    "dot": Format((".dot", ".gv"), {"graph": _render_dot}, is_text=True),
    "svg": Format(
        (".svg",), {"graph": partial(_draw_graph, "svg")}, is_text=True, needs_engine=True
    ),
    "png": Format((".png",), {"graph": partial(_draw_graph, "png")}, needs_engine=True),
    "pdf": Format((".pdf",), {"graph": partial(_draw_graph, "pdf")}, needs_engine=True),
}
"""By name; a further format is a further line."""


def find_format(path: str | os.PathLike[str]) -> str:
    """The name of the format of a file.

    Raises:
        UsageError: The file has no suffix of one.

    >>> find_format("peak.SVG")
    'svg'
    """
    name = os.path.basename(os.fspath(path))
    for kind, entry in FORMATS.items():
        if name.lower().endswith(entry.suffixes):
            return kind
    suffixes = ", ".join(entry.suffixes[0] for entry in FORMATS.values())
    raise UsageError(f"what to draw in {name!r} is not known by its suffix", hint=suffixes)


def check_format(kind: str, view: str | None = None) -> None:
    """Checks that something can be drawn, before the work that leads to it.

    Args:
        kind: Name of the format.
        view: What of an analysis to draw; None for what the format is for.

    Raises:
        UsageError: There is no such format, it has no such view, or no Graphviz that draws it.
    """
    if kind not in FORMATS:
        raise UsageError(f"there is no format {kind!r}", hint=f"one of {', '.join(FORMATS)}")
    views = FORMATS[kind].views
    view = view or next(iter(views))
    if view not in views:
        raise UsageError(f"there is no view {view!r} as {kind}", hint=f"one of {', '.join(views)}")
    if FORMATS[kind].needs_engine and view == GRAPH:
        find_engine(kind)


def render(analysis: Analysis, kind: str, options: RenderOptions) -> bytes:
    """An analysis, drawn.

    Args:
        analysis: The analysis.
        kind: Name of the format.
        options: How to draw it.

    Raises:
        UsageError: It cannot be drawn so, or the plan is for another model.
    """
    check_format(kind, options.view)
    views = FORMATS[kind].views
    return views[options.view or next(iter(views))](analysis, options)

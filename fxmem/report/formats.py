"""The table of output formats, by their suffixes.

A further format is a module with a function from :class:`RenderOptions` to bytes, and a line in
:data:`FORMATS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.planning.describe import check_fingerprint
from fxmem.planning.outcome import find_planned_step
from fxmem.planning.plan import Plan
from fxmem.report.document import build_document
from fxmem.report.graph.dot import Picture, build_picture, draw_dot, find_engine
from fxmem.report.graph.tree import Detail
from fxmem.report.graph.view import NO_OVERLAY, build_view, lay_plan
from fxmem.report.html import Page, write_html
from fxmem.report.plots import draw_timeline, draw_tradeoff, find_matplotlib
from fxmem.report.snapshot import write_snapshot

GRAPH, TIMELINE, TRADEOFF = "graph", "timeline", "tradeoff"
"""Views: Graphviz draws the first, where a format needs it at all, and matplotlib the others."""
SNAPSHOT = "snapshot"
"""The view for PyTorch's own viewer."""
REPORT = "report"
"""The view that has all of the others in it."""


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
        raise UsageError(f"--depth must be 1 or more, got {depth}")
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


def draw_picture(analysis: Analysis, options: RenderOptions) -> Picture:
    """Builds the picture of the graph.

    Raises:
        UsageError: The plan is for another model, or other inputs.
    """
    document = build_document(analysis)
    plan, overlay = options.plan, NO_OVERLAY
    if plan is not None:
        _check_plan(analysis, plan)
        overlay = lay_plan(plan, document.nodes)
    return build_picture(build_view(document, overlay, options.detail))


def _check_plan(analysis: Analysis, plan: Plan) -> None:
    check_fingerprint(plan, analysis.graph, "fxmem plan -o")


def _render_dot(analysis: Analysis, options: RenderOptions) -> bytes:
    return draw_picture(analysis, options).source.encode()  # type: ignore[no-any-return]


def _draw_graph(kind: str, analysis: Analysis, options: RenderOptions) -> bytes:
    return draw_dot(draw_picture(analysis, options).source, kind)


def _write_page(analysis: Analysis, options: RenderOptions) -> bytes:
    if options.plan is not None:
        _check_plan(analysis, options.plan)
    svg, note = b"", ""
    try:
        svg = _draw_graph("svg", analysis, options)
    except UsageError as error:  # the report is worth having without a picture
        note = f"The graph is not drawn: {error}."
    page = Page(analysis, options.plan, options.front, svg, note)
    return write_html(page).encode()


def _draw_timeline(kind: str, analysis: Analysis, options: RenderOptions) -> bytes:
    plan = options.plan
    if plan is None:
        return draw_timeline(analysis, kind)
    _check_plan(analysis, plan)
    return draw_timeline(analysis, kind, plan, find_planned_step(analysis, plan))


def _draw_tradeoff(kind: str, analysis: Analysis, options: RenderOptions) -> bytes:
    if options.plan is not None:
        _check_plan(analysis, options.plan)
    return draw_tradeoff(analysis, kind, options.front, options.plan)


def _write_snapshot(analysis: Analysis, options: RenderOptions) -> bytes:
    if options.plan is None:
        return write_snapshot(analysis)
    _check_plan(analysis, options.plan)
    planned = find_planned_step(analysis, options.plan)
    if planned is None:
        raise UsageError(
            "the step with this plan does not have the plan's peak",
            hint="make the plan again with this version of fxmem",
        )
    return write_snapshot(planned)


def _list_pictures(kind: str) -> Mapping[str, Renderer]:
    return {
        GRAPH: partial(_draw_graph, kind),
        TIMELINE: partial(_draw_timeline, kind),
        TRADEOFF: partial(_draw_tradeoff, kind),
    }


FORMATS: Mapping[str, Format] = {
    "dot": Format((".dot", ".gv"), {GRAPH: _render_dot}, is_text=True),
    "svg": Format((".svg",), _list_pictures("svg"), is_text=True, needs_engine=True),
    "png": Format((".png",), _list_pictures("png"), needs_engine=True),
    "pdf": Format((".pdf",), _list_pictures("pdf"), needs_engine=True),
    "pickle": Format((".pickle",), {SNAPSHOT: _write_snapshot}),
    "html": Format((".html", ".htm"), {REPORT: _write_page}, is_text=True),
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
    raise UsageError(f"unknown output format of {name!r}", hint=f"use {suffixes}")


def check_format(kind: str, view: str | None = None) -> None:
    """Checks that something can be drawn, before the work that leads to it.

    Args:
        kind: Name of the format.
        view: What of an analysis to draw; None for what the format is for.

    Raises:
        UsageError: There is no such format, it has no such view, or nothing is installed that
            draws it.
    """
    if kind not in FORMATS:
        raise UsageError(f"unknown output format {kind!r}", hint=f"use {', '.join(FORMATS)}")
    views = FORMATS[kind].views
    view = view or next(iter(views))
    if view not in views:
        others = [name for name, entry in FORMATS.items() if view in entry.views]
        hint = f"use {', '.join(others)}" if others else f"use {', '.join(views)}"
        raise UsageError(f"{kind} has no view {view!r}", hint=hint)
    if FORMATS[kind].needs_engine and view == GRAPH:
        find_engine(kind)
    if view in (TIMELINE, TRADEOFF):
        find_matplotlib()


def check_options(kind: str, options: RenderOptions) -> None:
    """Checks that what is asked for goes together.

    Raises:
        UsageError: How much of the graph to show, where no graph is shown.
    """
    view = options.view or next(iter(FORMATS[kind].views))
    if options.detail != Detail() and view in (TIMELINE, TRADEOFF, SNAPSHOT):
        raise UsageError(f"depth and expand are for the graph, not for a {view}")


def needs_model(kind: str, options: RenderOptions) -> bool:
    """Whether more has to be known of a step than a saved report says."""
    view = options.view or next(iter(FORMATS[kind].views))
    return view == TRADEOFF or (options.plan is not None and view in (TIMELINE, SNAPSHOT))


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
    check_options(kind, options)
    views = FORMATS[kind].views
    return views[options.view or next(iter(views))](analysis, options)

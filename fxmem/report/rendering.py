"""The formats in which an analysis can be drawn, by their suffixes."""

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
from fxmem.report.cutting import Detail
from fxmem.report.document import build_document
from fxmem.report.dot import write_dot
from fxmem.report.engines import draw_dot, find_engine
from fxmem.report.graph_view import build_view
from fxmem.report.html import Page, write_html
from fxmem.report.memory_snapshot import write_snapshot
from fxmem.report.overlay import NO_OVERLAY, lay_plan
from fxmem.report.plotting import find_matplotlib
from fxmem.report.timeline_plot import draw_timeline
from fxmem.report.trace_events import write_trace
from fxmem.report.tradeoff_plot import draw_tradeoff

GRAPH, TIMELINE, TRADEOFF = "graph", "timeline", "tradeoff"
"""Views: Graphviz draws the first, where a format needs it at all, and matplotlib the others."""
SNAPSHOT, TRACE = "snapshot", "trace"
"""Views that are for other programs."""
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
        _check_plan(analysis, plan)
        overlay = lay_plan(plan, document.nodes)
    return write_dot(build_view(document, overlay, options.detail))


def _check_plan(analysis: Analysis, plan: Plan) -> None:
    check_fingerprint(plan, analysis.graph, "fxmem plan -o")


def _render_dot(analysis: Analysis, options: RenderOptions) -> bytes:
    return render_dot(analysis, options).encode()


def _draw_graph(kind: str, analysis: Analysis, options: RenderOptions) -> bytes:
    return draw_dot(render_dot(analysis, options), kind)


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


def _write_step(
    write: Callable[[Analysis], bytes], analysis: Analysis, options: RenderOptions
) -> bytes:
    """What is for other programs, of the step with the plan where there is one."""
    if options.plan is None:
        return write(analysis)
    _check_plan(analysis, options.plan)
    planned = find_planned_step(analysis, options.plan)
    if planned is None:
        raise UsageError(
            "the step with this plan does not have the plan's peak",
            hint="make the plan anew with this fxmem",
        )
    return write(planned)


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
    "pickle": Format((".pickle",), {SNAPSHOT: partial(_write_step, write_snapshot)}),
    "trace": Format((".trace.json",), {TRACE: partial(_write_step, write_trace)}, is_text=True),
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
    raise UsageError(f"what to draw in {name!r} is not known by its suffix", hint=suffixes)


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
        raise UsageError(f"there is no format {kind!r}", hint=f"one of {', '.join(FORMATS)}")
    views = FORMATS[kind].views
    view = view or next(iter(views))
    if view not in views:
        others = [name for name, entry in FORMATS.items() if view in entry.views]
        hint = f"as {', '.join(others)}" if others else f"one of {', '.join(views)}"
        raise UsageError(f"there is no view {view!r} as {kind}", hint=hint)
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
    if options.detail != Detail() and view in (TIMELINE, TRADEOFF, SNAPSHOT, TRACE):
        raise UsageError(f"depth and expand are for the graph, not for a {view}")


def needs_model(kind: str, options: RenderOptions) -> bool:
    """Whether more has to be known of a step than a saved report says."""
    view = options.view or next(iter(FORMATS[kind].views))
    return view == TRADEOFF or (options.plan is not None and view in (TIMELINE, SNAPSHOT, TRACE))


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

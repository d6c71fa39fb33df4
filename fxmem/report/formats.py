"""The table of output formats.

A further format is a module with a function that writes it, and a line in :data:`FORMATS`; the
help of ``fxmem render`` and its errors list what the table has. Modules of formats are imported
when they draw: each has libraries of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan
    from fxmem.report.graph.dot import Picture

GRAPH, TIMELINE, TRADEOFF, SNAPSHOT, REPORT = "graph", "timeline", "tradeoff", "snapshot", "report"
"""Views of a step: drawn by Graphviz; by matplotlib, twice; for PyTorch's viewer; all in one."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options of a picture."""

    view: str | None = None  # one of the format's views; None for its first
    depth: int | None = None  # levels of modules that are open; None for as many as can be read
    expand: bool = False  # to every operation, and each of the blocks that repeat
    plan: Plan | None = None  # to show on the step
    front: tuple[Plan, ...] = ()  # the step's trade-offs, from :func:`fxmem.pareto`

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 1:
            raise UsageError(f"--depth must be 1 or more, got {self.depth}")


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file."""

    suffixes: tuple[str, ...]  # in lower case, the usual one first
    views: Mapping[str, Callable[[Analysis, RenderOptions, str], bytes]]  # the default first
    is_text: bool = False  # a terminal can show it
    needs_engine: bool = False  # Graphviz draws its graph


def draw_picture(analysis: Analysis, options: RenderOptions) -> Picture:
    """Builds the picture of the graph, with the plan on it."""
    from fxmem.planning.plan import check_fingerprint
    from fxmem.report.document import build_document
    from fxmem.report.graph.dot import build_picture
    from fxmem.report.graph.tree import Detail
    from fxmem.report.graph.view import NO_OVERLAY, build_view, lay_plan

    document, overlay = build_document(analysis), NO_OVERLAY
    if options.plan is not None:
        check_fingerprint(options.plan, analysis.graph, "fxmem plan -o")
        overlay = lay_plan(options.plan, document.nodes)
    return build_picture(build_view(document, overlay, Detail(options.depth, options.expand)))


def _draw_graph(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.graph.engine import draw_dot

    source: str = draw_picture(analysis, options).source
    return source.encode() if kind == "dot" else draw_dot(source, kind)


def _draw_timeline(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.planning.outcome import find_planned_step
    from fxmem.report.plots import draw_timeline

    planned = None if options.plan is None else find_planned_step(analysis, options.plan)
    return draw_timeline(analysis, kind, options.plan, planned)


def _draw_tradeoff(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.plots import draw_tradeoff

    return draw_tradeoff(analysis, kind, options.front, options.plan)


def _write_snapshot(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.planning.outcome import find_planned_step
    from fxmem.report.snapshot import write_snapshot

    step = analysis if options.plan is None else find_planned_step(analysis, options.plan)
    if step is None:
        cause = "the step with this plan does not have the plan's peak"
        raise UsageError(cause, hint="make the plan again with this version of fxmem")
    return write_snapshot(step)


def _write_page(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.html import write_html

    svg, note = b"", ""
    try:
        svg = _draw_graph(analysis, options, "svg")
    except UsageError as error:  # the report is worth having without a picture
        note = f"The graph is not drawn: {error}."
    return write_html(analysis, options.plan, options.front, svg, note).encode()


_PICTURES = {GRAPH: _draw_graph, TIMELINE: _draw_timeline, TRADEOFF: _draw_tradeoff}
FORMATS: Mapping[str, Format] = {
    "dot": Format((".dot", ".gv"), {GRAPH: _draw_graph}, is_text=True),
    "svg": Format((".svg",), _PICTURES, is_text=True, needs_engine=True),
    "png": Format((".png",), _PICTURES, needs_engine=True),
    "pdf": Format((".pdf",), _PICTURES, needs_engine=True),
    "html": Format((".html", ".htm"), {REPORT: _write_page}, is_text=True),
    "pickle": Format((".pickle",), {SNAPSHOT: _write_snapshot}),
}
SUFFIXES = ", ".join(entry.suffixes[0] for entry in FORMATS.values())


def find_format(path: str | os.PathLike[str]) -> str:
    """Finds the name of the format of a file by its suffix.

    >>> find_format("peak.SVG")
    'svg'
    """
    name = os.path.basename(os.fspath(path))
    for kind, entry in FORMATS.items():
        if name.lower().endswith(entry.suffixes):
            return kind
    suffix = os.path.splitext(name)[1]
    cause = f"unknown output format {suffix!r}" if suffix else f"{name!r} has no suffix"
    raise UsageError(cause, hint=f"use {SUFFIXES}")


def find_view(kind: str, options: RenderOptions) -> str:
    """Finds the view to draw, and checks that it can be drawn, before the work that leads to it."""
    if kind not in FORMATS:
        raise UsageError(f"unknown output format {kind!r}", hint=f"use {', '.join(FORMATS)}")
    views = FORMATS[kind].views
    view = options.view or next(iter(views))
    if view not in views:
        others = [name for name, entry in FORMATS.items() if view in entry.views]
        raise UsageError(f"{kind} has no view {view!r}", hint=f"use {', '.join(others or views)}")
    if FORMATS[kind].needs_engine and view == GRAPH:
        from fxmem.report.graph.engine import find_engine

        find_engine(kind)
    if view in (TIMELINE, TRADEOFF) and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed", hint="pip install matplotlib")
    return view


def render(analysis: Analysis, kind: str, options: RenderOptions) -> bytes:
    """Draws an analysis; refuses a plan for another model."""
    from fxmem.planning.plan import check_fingerprint

    view = find_view(kind, options)
    if options.plan is not None:
        if analysis.setup.mesh is not None:
            raise UsageError(
                "plans are not drawn on the step of a rank",
                hint="draw fxmem.analyze(fxmem.apply(model, plan), ..., mesh=...)",
            )
        check_fingerprint(options.plan, analysis.graph, "fxmem plan -o")
    return FORMATS[kind].views[view](analysis, options, kind)

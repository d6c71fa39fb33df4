"""The table of formats of files, by their suffixes.

Reports are written from the blocks of any result, pictures are drawn of a step. Modules that draw
are imported when they draw: each has libraries of its own.
"""

from __future__ import annotations

import html
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError
from fxmem.report.blocks import Heading, render_csv, render_markdown, render_text

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan
    from fxmem.report.graph.dot import Picture
    from fxmem.report.result import Result

GRAPH, TIMELINE, TRADEOFF, SNAPSHOT, REPORT = "graph", "timeline", "tradeoff", "snapshot", "report"
"""Views of a step: drawn by Graphviz; by matplotlib, twice; for PyTorch's viewer; all in one."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options of a picture."""

    view: str | None = None  # one of the format's views; None for its first
    depth: int | None = None  # levels of modules that are open; None for as many as can be read
    expand: bool = False  # to every operation, and each of the blocks that repeat
    plan: Plan | None = None  # to show on the step
    front: Iterable[Plan] = ()  # the step's trade-offs, from :func:`fxmem.pareto`
    shown: Mapping[str, Any] = field(default_factory=dict)  # what ``list_blocks`` takes
    width: int | None = None  # columns of text; None for no limit

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 1:
            raise UsageError(f"--depth must be 1 or more, got {self.depth}")


View = Callable[[Any, RenderOptions, str], str | bytes]
"""Takes a result, options and the name of the format."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file."""

    suffixes: tuple[str, ...]  # in lower case, the usual one first
    views: Mapping[str, View]  # the default first
    is_text: bool = False  # a terminal can show it
    is_report: bool = False  # of any result, else a picture of a step
    needs_engine: bool = False  # Graphviz draws its graph


def draw_picture(analysis: Analysis, options: RenderOptions) -> Picture:
    """Builds the picture of the graph, with the plan on it."""
    from fxmem.report.document import build_document
    from fxmem.report.graph.dot import build_picture
    from fxmem.report.graph.tree import Detail
    from fxmem.report.graph.view import NO_OVERLAY, build_view, lay_plan

    document, overlay = build_document(analysis), NO_OVERLAY
    if options.plan is not None:
        options.plan.check(analysis.graph)
        overlay = lay_plan(options.plan, document.nodes)
    return build_picture(build_view(document, overlay, Detail(options.depth, options.expand)))


def _draw_graph(analysis: Analysis, options: RenderOptions, kind: str) -> str | bytes:
    from fxmem.report.graph.engine import draw_dot

    source: str = draw_picture(analysis, options).source
    return source if kind == "dot" else draw_dot(source, kind)


def _draw_timeline(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.plots import draw_timeline

    planned = None if options.plan is None else options.plan.find_step(analysis)
    return draw_timeline(analysis, kind, options.plan, planned)


def _draw_tradeoff(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.plots import draw_tradeoff

    return draw_tradeoff(analysis, kind, tuple(options.front), options.plan)


def _write_snapshot(analysis: Analysis, options: RenderOptions, kind: str) -> bytes:
    from fxmem.report.snapshot import write_snapshot

    step = analysis if options.plan is None else options.plan.find_step(analysis)
    if step is None:
        cause = "the step with this plan does not have the plan's peak"
        raise UsageError(cause, hint="make the plan again with this version of fxmem")
    return write_snapshot(step)


def _write_page(result: Any, options: RenderOptions, kind: str) -> str:
    from fxmem.report.graph.engine import draw_dot
    from fxmem.report.html import write_fragment, write_html

    analysis = result.pictured
    if analysis is None:
        headings = (block.text for block in result.list_blocks() if isinstance(block, Heading))
        title = html.escape(next(headings, "fxmem"))
        head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        return head + write_fragment(result)
    svg, note = b"", ""
    try:
        svg = draw_dot(draw_picture(analysis, options).source, "svg")
    except UsageError as error:  # the report is worth having without a picture
        note = f"The graph is not drawn: {error}."
    return write_html(analysis, options.plan, tuple(options.front), svg, note)


def _write_blocks(result: Result, options: RenderOptions, kind: str) -> str:
    if kind == "json":
        return f"{result.to_json(indent=2)}\n"
    blocks = result.list_blocks(**options.shown)
    if kind == "txt":
        return render_text(blocks, options.width)
    return render_markdown(blocks) if kind == "md" else render_csv(blocks)


_PICTURES: Mapping[str, View] = {
    GRAPH: _draw_graph,
    TIMELINE: _draw_timeline,
    TRADEOFF: _draw_tradeoff,
}
_BLOCKS: Mapping[str, View] = {REPORT: _write_blocks}
FORMATS: dict[str, Format] = {
    "dot": Format((".dot", ".gv"), {GRAPH: _draw_graph}, is_text=True),
    "svg": Format((".svg",), _PICTURES, is_text=True, needs_engine=True),
    "png": Format((".png",), _PICTURES, needs_engine=True),
    "pdf": Format((".pdf",), _PICTURES, needs_engine=True),
    "html": Format((".html", ".htm"), {REPORT: _write_page}, is_text=True, is_report=True),
    "pickle": Format((".pickle",), {SNAPSHOT: _write_snapshot}),
    "txt": Format((".txt",), _BLOCKS, is_text=True, is_report=True),
    "md": Format((".md",), _BLOCKS, is_text=True, is_report=True),
    "csv": Format((".csv",), _BLOCKS, is_text=True, is_report=True),
    "json": Format((".json",), _BLOCKS, is_text=True, is_report=True),
}


def register_format(suffix: str, renderer: Callable[[Any], str | bytes]) -> None:
    """Registers a format of reports, for ``-o`` of all commands and :func:`fxmem.render`.

    Args:
        suffix: The suffix of its files, such as ``".tex"``.
        renderer: Takes any result, whose ``list_blocks()`` and ``to_dict()`` have all that there
            is, and returns the content of a file.

    Raises:
        UsageError: The suffix is none.
    """
    if not suffix.startswith(".") or len(suffix) < 2:
        raise UsageError(f"{suffix!r} is not a suffix", hint="such as '.tex'")
    views: Mapping[str, View] = {REPORT: lambda result, options, kind: renderer(result)}
    FORMATS[suffix[1:].lower()] = Format((suffix.lower(),), views, is_text=True, is_report=True)


def list_suffixes() -> str:
    """Lists the usual suffixes of all formats."""
    return ", ".join(entry.suffixes[0] for entry in FORMATS.values())


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
    raise UsageError(cause, hint=f"use {list_suffixes()}")


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


def render_as(result: Any, kind: str, options: RenderOptions) -> str | bytes:
    """Writes a result in a format; refuses a plan for another model."""
    view, entry, step = find_view(kind, options), FORMATS[kind], result.pictured
    if step is None and (options.plan is not None or not entry.is_report):
        what = "a plan" if entry.is_report else kind
        raise UsageError(f"{what} is for a step, not for this result", hint="use an analysis")
    if options.plan is not None:
        if step.setup.mesh is not None:
            raise UsageError(
                "plans are not drawn on the step of a rank",
                hint="draw fxmem.analyze(fxmem.apply(model, plan), ..., mesh=...)",
            )
        options.plan.check(step.graph)
    return entry.views[view](result if entry.is_report else step, options, kind)


def render(
    result: Any,
    path: str | os.PathLike[str],
    *,
    view: str | None = None,
    depth: int | None = None,
    expand: bool = False,
    plan: Plan | None = None,
    front: Iterable[Plan] = (),
) -> None:
    """Writes a result to a file; for an analysis also the method :meth:`fxmem.Analysis.render`.

    Args:
        result: An analysis, or any other result.
        path: The file, whose suffix chooses the format: ``.txt``, ``.md``, ``.csv``, ``.json`` or
            ``.html`` for a report; of a step also ``.svg``, ``.png``, ``.pdf`` or ``.dot`` for a
            picture, and ``.pickle`` for PyTorch's memory viewer.
        view: The view of the step; None for the format's default.
        depth: How many levels of modules to open; None for as many as can be read, and
            all levels around the peak.
        expand: Show every operation and each of the blocks that repeat.
        plan: A plan to show on the step.
        front: The trade-offs of the step, from :func:`fxmem.pareto`.

    Raises:
        UsageError: The suffix is not known, or no program that draws it is installed.
    """
    written = render_as(result, find_format(path), RenderOptions(view, depth, expand, plan, front))
    with open(path, "wb") as file:
        file.write(encode(written))


def encode(written: str | bytes) -> bytes:
    """Encodes text for a file; names may hold what is no Unicode."""
    return written if isinstance(written, bytes) else written.encode("utf-8", "backslashreplace")

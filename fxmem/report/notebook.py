"""Analyses, plans, fronts and verifications as text, and as tables and pictures in a notebook."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Union

from markupsafe import Markup

from fxmem.analysis import Analysis
from fxmem.batching.record import MaxBatch
from fxmem.errors import UsageError
from fxmem.fitting.record import Fitting
from fxmem.pipelines.pipeline import Pipeline
from fxmem.planning.outcome import find_planned_step
from fxmem.planning.plan import Front, Plan
from fxmem.report.batch_text import list_max_batch_blocks
from fxmem.report.document import build_document
from fxmem.report.fit_text import list_fitting_blocks, write_layout
from fxmem.report.formats import GRAPH, TIMELINE, TRADEOFF, RenderOptions, render
from fxmem.report.html import clean_svg, load_template
from fxmem.report.module_table import write_modules
from fxmem.report.pipeline_text import list_pipeline_blocks
from fxmem.report.plan_text import list_front_blocks, list_plan_blocks
from fxmem.report.script_text import list_script_blocks
from fxmem.report.suggestions import render_suggestions, suggest_code
from fxmem.report.tables import Table, join_blocks
from fxmem.report.text import list_blocks
from fxmem.report.verify_text import list_verification_blocks
from fxmem.scripts.script_run import ScriptRun

if TYPE_CHECKING:
    from fxmem.verifying.verification import Verification

Reported = Union[Analysis, Plan, Front, Fitting, MaxBatch, Pipeline, ScriptRun, "Verification"]
_DEPTH = 2  # of the modules' table, which is there besides the report


def write_text(value: Reported, width: int | None = None) -> str:
    """Writes the report that the command line prints, without the last newline."""
    text = join_blocks(_list_blocks(value, width))
    if isinstance(value, Plan) and value.analysis is not None and not value.analysis.setup.mesh:
        nodes, sources = value.analysis.nodes, {}
        for path in {node.source.file for node in nodes if node.source is not None}:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # such as code that was typed
                sources[path] = Path(path).read_text(encoding="utf-8")
        suggestions = render_suggestions(suggest_code(value, nodes, sources))
        text = f"{text}\n{suggestions}" if suggestions else text
    return text.rstrip("\n")


def write_html(value: Reported) -> str:
    """Writes the report as a part of a page: tables, and pictures as far as they can be drawn."""
    blocks = [b.drop_empty() if isinstance(b, Table) else b for b in _list_blocks(value) if b]
    modules, plots, graph = None, list[str](), ""
    for view, analysis, options in _list_pictures(value):
        try:
            svg = render(analysis, "svg", options)
        except UsageError:  # a program or matplotlib is missing: the tables do without
            continue
        if view == GRAPH:
            graph = Markup(clean_svg(svg))
        else:  # in a frame of its own: matplotlib's ids and styles are for a whole page
            plots.append(base64.b64encode(svg).decode())
    if isinstance(value, Analysis):
        modules = write_modules(value.modules, value.setup.model, _DEPTH).drop_empty()
    bars = {label: nbytes for label, nbytes in _list_bars(value) if nbytes}
    parts = {"blocks": blocks, "modules": modules, "plots": plots, "graph": graph, "bars": bars}
    text: str = load_template("notebook.html").render(parts)
    return text


def _list_blocks(value: Reported, width: int | None = None) -> list[str | Table]:
    if isinstance(value, Analysis):
        return list_blocks(build_document(value), width=width)
    if isinstance(value, ScriptRun):
        return list_script_blocks(value, width=width)
    if isinstance(value, Plan):
        if value.analysis is None:
            return list_plan_blocks(value, None, width=width)
        planned, setup = find_planned_step(value.analysis, value), value.analysis.setup
        return list_plan_blocks(value, setup, None if planned is None else planned.peak, width)
    if isinstance(value, Front):
        analysis = value[0].analysis
        return list_front_blocks(value, analysis.setup if analysis else None, width)
    if isinstance(value, MaxBatch):
        return list_max_batch_blocks(value, width)
    if isinstance(value, Fitting):
        return list_fitting_blocks(value, width)
    if isinstance(value, Pipeline):
        return list_pipeline_blocks(value, width)
    return list_verification_blocks(value, width)


def _list_pictures(value: Reported) -> Iterator[tuple[str, Analysis, RenderOptions]]:
    if isinstance(value, Analysis | ScriptRun):
        step = value.largest if isinstance(value, ScriptRun) else value
        yield TIMELINE, step, RenderOptions(TIMELINE)
        yield GRAPH, step, RenderOptions(GRAPH)
    elif isinstance(value, Plan) and value.analysis is not None:
        is_one_process = value.analysis.setup.mesh is None
        yield (
            TIMELINE,
            value.analysis,
            RenderOptions(TIMELINE, plan=value if is_one_process else None),
        )
    elif isinstance(value, Front) and value[0].analysis is not None:
        yield TRADEOFF, value[0].analysis, RenderOptions(TRADEOFF, front=tuple(value))


def _list_bars(value: Reported) -> Iterator[tuple[str, int | None]]:
    """Yields peaks to compare, each with a label."""
    if isinstance(value, Plan):
        yield "without the plan", value.baseline_peak_bytes
        yield "with the plan", value.peak_bytes
    elif isinstance(value, MaxBatch):
        yield f"batch {value.batch}", value.peak_bytes
        yield f"batch {value.next_batch}", value.next_peak_bytes
        yield "memory", value.memory_bytes
    elif isinstance(value, Fitting):
        for row in value.rows:
            yield write_layout(row), row.reserved_bytes
    elif isinstance(value, Pipeline):
        for rank in value.ranks:
            yield f"rank {rank.rank}", rank.peak_bytes
    elif isinstance(value, ScriptRun):
        for step in value.steps:
            yield ", ".join(step.setup.inputs), step.peak_bytes
    elif not isinstance(value, Analysis | Front):
        yield "model, measured", value.baseline.peak_bytes
        yield "with the plan, measured", value.planned.peak_bytes
        yield "with the plan, promised", value.promise.peak_bytes if value.promise else None

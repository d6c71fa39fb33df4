"""A plot of what is live over a step, by category."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxmem.analysis import Analysis
from fxmem.graph import Category, Operation
from fxmem.memory.liveness import list_category_bytes
from fxmem.planning.plan import Plan
from fxmem.report.document import build_document
from fxmem.report.plotting import (
    INK,
    PALE,
    PEAK_COLOR,
    PLAN_COLOR,
    STYLES,
    choose_unit,
    plain_style,
    save_figure,
    write_title,
)
from fxmem.report.text import write_headline, write_subject
from fxmem.report.timeline_data import COLUMNS, Lines, choose_moments, find_lines, list_runs
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 10.0, 5.2
"""Inches."""
_LEFT, _BOTTOM, _PLOT_WIDTH, _PLOT_HEIGHT = 0.75, 0.55, 6.85, 3.5
_HEADROOM = 1.2
_LETTER_INCHES = 0.085


def draw_timeline(
    analysis: Analysis, kind: str, plan: Plan | None = None, planned: Analysis | None = None
) -> bytes:
    """What is live over a step as stacked areas, with its phases and its peak.

    Args:
        analysis: Of the step.
        kind: ``svg``, ``png`` or ``pdf``.
        plan: A plan of it, whose peak is drawn too; or None.
        planned: The step with the plan; None where that is not known.
    """
    with plain_style():
        return save_figure(build_figure(analysis, plan, planned), kind)


def build_figure(
    analysis: Analysis, plan: Plan | None = None, planned: Analysis | None = None
) -> Figure:
    """The plot before it is a file; the arguments are those of :func:`draw_timeline`."""
    from matplotlib.figure import Figure

    document = build_document(analysis)
    unit, unit_name = choose_unit(analysis.peak_bytes)
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    subject = write_subject(document.subject).removeprefix(f"{document.subject.model}; ")
    write_title(figure, document.subject.model, [write_headline(document.headline), subject])
    axes = figure.add_axes(
        (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, _PLOT_WIDTH / _WIDTH, _PLOT_HEIGHT / _HEIGHT)
    )
    steps = len(analysis.graph.operations)
    axes.set_xlim(0, steps)
    axes.set_ylim(0, max(analysis.peak_bytes, 1) / unit * _HEADROOM)
    axes.set_ylabel(f"live memory ({unit_name})")
    axes.set_xlabel("operations of the step, in order")
    axes.spines[["top", "right"]].set_visible(False)
    lines = find_lines(analysis, plan, planned, unit)
    present = _draw_areas(axes, analysis, unit, lines)
    _mark_phases(axes, analysis.graph.operations)
    if plan is not None:
        _draw_plan(axes, lines, planned)
    _mark_peak(axes, analysis, unit)
    _write_legend(figure, analysis, present, plan, planned is not None)
    return figure


def _draw_areas(axes: Axes, analysis: Analysis, unit: int, lines: Lines) -> dict[Category, int]:
    """The areas, what stays at the bottom; returns each one's bytes at the peak, bottom first."""
    series = list_category_bytes(analysis.allocated_graph)
    moments = choose_moments(analysis.profile.live_bytes, COLUMNS)
    present = [category for category in STYLES if any(series[category])]
    tops, total = dict[Category, list[float]](), [0] * len(moments)
    for category in present:
        total = [below + series[category][m] for below, m in zip(total, moments, strict=True)]
        tops[category] = [nbytes / unit for nbytes in total]
    edges = _list_edges(len(moments), axes.get_xlim()[1])
    for category in reversed(present):  # each covers the lower part of the one above it
        color, hatch = STYLES[category]
        axes.fill_between(
            edges,
            [*tops[category], tops[category][-1]],
            step="post",
            facecolor=color,
            edgecolor="#16191D70",
            hatch=hatch,
            linewidth=0.3,
        )
    _label_areas(axes, tops, edges, lines)
    return {category: series[category][analysis.peak.step] for category in present}


def _list_edges(columns: int, end: float) -> list[float]:
    return [end * column / columns for column in range(columns + 1)]


def _label_areas(
    axes: Axes, tops: Mapping[Category, Sequence[float]], edges: Sequence[float], lines: Lines
) -> None:
    """The names of areas within them, where they are high and wide enough and no line is."""
    bottoms: Sequence[float] = [0.0] * (len(edges) - 1)
    least = axes.get_ylim()[1] * 0.2 / _PLOT_HEIGHT
    for category, upper in tops.items():
        text = category.value.replace("_", " ").lower()
        columns = max(1, round((len(text) + 2) * _LETTER_INCHES / _PLOT_WIDTH * len(upper)))
        rooms = [
            (high - low, -at, low)
            for at in range(len(upper) - columns + 1)
            for low, high in lines.split(
                (edges[at], edges[at + columns]),
                (max(bottoms[at : at + columns]), min(upper[at : at + columns])),
            )
        ]
        room, at, low = max(rooms, default=(0.0, 0, 0.0))
        if room >= least:
            axes.text(
                (edges[-at] + edges[columns - at]) / 2,
                low + room / 2,
                text,
                ha="center",
                va="center",
                size=8.5,
                bbox={"facecolor": "#FFFFFFE8", "edgecolor": "none", "pad": 1.2},
                zorder=6,
            )
        bottoms = upper


def _mark_phases(axes: Axes, operations: Sequence[Operation]) -> None:
    """Lines between the phases, and their names above; those of narrow ones a row higher."""
    end, free = len(operations), -math.inf
    for (phase, _), run in list_runs(operations):
        start, stop = run[0].index, run[-1].index + 1
        if start:
            axes.axvline(start, color=PALE, linewidth=0.8, linestyle=(0, (2, 2)), zorder=4)
        inches = (stop - start) / end * _PLOT_WIDTH
        needed = (len(phase.value) + 1) * _LETTER_INCHES
        is_narrow = inches < needed
        if is_narrow:  # beside another such name there may be no room
            middle = (start + stop) / 2 / end * _PLOT_WIDTH
            if middle - needed / 2 < free:
                continue
            free = middle + needed / 2
        axes.annotate(
            phase.value,
            ((start + stop) / 2, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 13 if is_narrow else 3),
            textcoords="offset points",
            ha="center",
            size=8.5,
            color=PALE,
            arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6} if is_narrow else None,
            annotation_clip=False,
        )


def _mark_peak(axes: Axes, analysis: Analysis, unit: int) -> None:
    peak, end = analysis.peak, len(analysis.graph.operations)
    x, y = peak.step + 0.5, peak.nbytes / unit
    share = x / end
    axes.plot([x, x], [0, y], color=PEAK_COLOR, linewidth=1.2, zorder=5)
    axes.plot([x], [y], marker="o", color=PEAK_COLOR, markersize=7, zorder=7, clip_on=False)
    side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
    shift = {"left": -6, "right": 6, "center": 0}[side]
    axes.annotate(
        f"peak {format_bytes(peak.nbytes)}",
        (x, y),
        xytext=(shift, 9),
        textcoords="offset points",
        ha=side,
        size=11,
        weight="bold",
        color=PEAK_COLOR,
        bbox={"facecolor": "#FFFFFFE8", "edgecolor": "none", "pad": 1.2},
        zorder=7,
        annotation_clip=False,
    )


def _draw_plan(axes: Axes, lines: Lines, planned: Analysis | None) -> None:
    """The step with the plan as a line, its phases where those without it are."""
    level = lines.level or 0.0
    axes.axhline(level, color=PLAN_COLOR, linewidth=0.9, linestyle=(0, (1, 2)), zorder=5)
    if planned is None:
        return
    for color, width, dashes in (("#FFFFFF", 3.4, (0, ())), (PLAN_COLOR, 1.7, (0, (5, 1.5)))):
        axes.plot(lines.xs, lines.ys, color=color, linewidth=width, linestyle=dashes, zorder=5.5)
    x = lines.xs[lines.ys.index(max(lines.ys))]
    axes.plot([x], [level], marker="D", color=PLAN_COLOR, markersize=7, zorder=7, clip_on=False)


def _write_legend(
    figure: Figure,
    analysis: Analysis,
    present: Mapping[Category, int],
    plan: Plan | None,
    has_line: bool,
) -> None:
    """Beside the plot, in the order of the areas: what each takes at the peak."""
    from matplotlib.patches import Rectangle

    left = _LEFT + _PLOT_WIDTH + 0.25
    axes = figure.add_axes((left / _WIDTH, 0, 1 - left / _WIDTH, 1))
    axes.set_xlim(0, _WIDTH - left)
    axes.set_ylim(0, _HEIGHT)
    axes.axis("off")
    right, y = _WIDTH - left - 0.15, _BOTTOM + _PLOT_HEIGHT - 0.1
    axes.text(0, y, "alive at the peak", size=9, weight="bold", color=INK, va="center")
    for category, nbytes in reversed([*present.items()]):
        y -= 0.25
        color, hatch = STYLES[category]
        axes.add_patch(
            Rectangle(
                *((0, y - 0.07), 0.26, 0.14),
                facecolor=color,
                hatch=hatch,
                edgecolor="#16191DA0",
                linewidth=0.5,
            )
        )
        axes.text(0.34, y, category.value.replace("_", " ").lower(), size=8.5, va="center")
        axes.text(right, y, format_bytes(nbytes), size=8.5, va="center", ha="right")
    if plan is None:
        return
    y -= 0.45
    dashes = (0, (5, 1.5)) if has_line else (0, (1, 2))
    axes.plot([0, 0.26], [y, y], color=PLAN_COLOR, linewidth=1.7, linestyle=dashes)
    axes.plot([0.13], [y], marker="D", color=PLAN_COLOR, markersize=5)
    axes.text(0.34, y, "with the plan", size=9, weight="bold", color=PLAN_COLOR, va="center")
    less = 1 - plan.peak_bytes / max(analysis.peak_bytes, 1)
    for line in (
        f"peak {format_bytes(plan.peak_bytes)}, {less:.0%} less",
        f"{plan.overhead:.1%} more time",
    ):
        y -= 0.21
        axes.text(0.34, y, line, size=8.5, va="center", color=PLAN_COLOR)

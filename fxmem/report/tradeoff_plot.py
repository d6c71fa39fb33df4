"""A plot of plans: how far the peak falls for how much more time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan
from fxmem.report.document import describe_subject
from fxmem.report.plotting import (
    INK,
    PEAK_COLOR,
    PLAN_COLOR,
    choose_unit,
    plain_style,
    save_figure,
    write_title,
)
from fxmem.report.text import write_subject
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 8.0, 5.0
_LEFT, _BOTTOM, _PLOT_WIDTH, _PLOT_HEIGHT = 0.75, 0.55, 7.0, 3.5
"""Inches."""


def draw_tradeoff(
    analysis: Analysis, kind: str, front: Sequence[Plan], plan: Plan | None = None
) -> bytes:
    """The peak of each plan of a front against the time that it adds.

    Args:
        analysis: Of the step.
        kind: ``svg``, ``png`` or ``pdf``.
        front: The trade-offs, as :func:`fxmem.pareto` has them.
        plan: The plan that was chosen, which is marked; or None.

    Raises:
        UsageError: There are no trade-offs.
    """
    if not front:
        raise UsageError("there are no trade-offs to draw", hint="front=fxmem.pareto(analysis)")
    with plain_style():
        return save_figure(build_figure(analysis, front, plan), kind)


def build_figure(analysis: Analysis, front: Sequence[Plan], plan: Plan | None = None) -> Figure:
    """The plot before it is a file; the arguments are those of :func:`draw_tradeoff`."""
    from matplotlib.figure import Figure

    unit, unit_name = choose_unit(analysis.peak_bytes)
    subject = describe_subject(analysis)
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    rest = write_subject(subject).removeprefix(f"{subject.model}; ")
    write_title(figure, subject.model, [_write_answer(analysis, front, plan), rest])
    axes = figure.add_axes(
        (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, _PLOT_WIDTH / _WIDTH, _PLOT_HEIGHT / _HEIGHT)
    )
    shown = [*front, *([] if plan is None else [plan])]
    most = max(max(p.overhead for p in shown), 0.01)
    axes.set_xlim(-0.03 * most, 1.08 * most)
    axes.set_ylim(0, analysis.peak_bytes / unit * 1.12)
    axes.set_xlabel("time that is added to the step, by the roofline of the target")
    axes.set_ylabel(f"peak ({unit_name})")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.7)
    axes.set_axisbelow(True)
    _draw_front(axes, analysis, front, unit)
    _write_labels(axes, analysis, front, plan, unit)
    return figure


def _write_answer(analysis: Analysis, front: Sequence[Plan], plan: Plan | None) -> str:
    chosen = plan or min(front, key=lambda p: (p.peak_bytes, p.overhead))
    what = "with the plan" if plan else "down to"
    return (
        f"Peak {format_bytes(analysis.peak_bytes)}; {what} {format_bytes(chosen.peak_bytes)} "
        f"for {chosen.overhead:.1%} more time"
    )


def _draw_front(axes: Axes, analysis: Analysis, front: Sequence[Plan], unit: int) -> None:
    ordered = sorted(front, key=lambda p: (p.overhead, -p.peak_bytes))
    xs, ys = [p.overhead for p in ordered], [p.peak_bytes / unit for p in ordered]
    end = axes.get_xlim()[1]
    axes.fill_between([*xs, end], [*ys, ys[-1]], step="post", color="#DCEAF7", zorder=1)
    axes.plot([*xs, end], [*ys, ys[-1]], drawstyle="steps-post", color="#0B5A94", linewidth=1.2)
    axes.plot(xs, ys, linestyle="", marker="o", color="#0B5A94", markersize=6, zorder=4)
    level = analysis.peak_bytes / unit
    axes.axhline(level, color=PEAK_COLOR, linewidth=1.0, linestyle=(0, (4, 2)))


def _write_labels(
    axes: Axes, analysis: Analysis, front: Sequence[Plan], plan: Plan | None, unit: int
) -> None:
    """The peak without a plan, the plan that was chosen, then as many points as have room."""
    end, height = axes.get_xlim()[1], axes.get_ylim()[1]
    level = analysis.peak_bytes / unit
    text = f"without a plan {format_bytes(analysis.peak_bytes)}"
    axes.text(
        end, level + 0.03 * height, text, ha="right", size=9.5, weight="bold", color=PEAK_COLOR
    )
    taken = [(level * 1.02, end)]
    if plan is not None:
        x, y = plan.overhead, plan.peak_bytes / unit
        axes.plot([x], [y], marker="D", color=PLAN_COLOR, markersize=10, zorder=6)
        _label(axes, x, y, f"chosen: {_describe(plan)}", PLAN_COLOR)
        taken.append((y, x))
    leanest = min(front, key=lambda p: (p.peak_bytes, p.overhead))
    middle = front[len(front) // 2]
    for candidate in (leanest, front[0], middle):
        x, y = candidate.overhead, candidate.peak_bytes / unit
        if all(abs(y - other) > 0.07 * height for other, _ in taken):
            _label(axes, x, y, _describe(candidate), INK)
            taken.append((y, x))


def _describe(plan: Plan) -> str:
    return f"{format_bytes(plan.peak_bytes)}, +{plan.overhead:.1%}"


def _label(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    # The curve falls: above it there is room to the right, below it to the left.
    is_right, is_low = x > 0.6 * axes.get_xlim()[1], y < 0.1 * axes.get_ylim()[1]
    axes.annotate(
        text,
        (x, y),
        xytext=(-6, 9 if is_low else -14) if is_right else (8, 7),
        textcoords="offset points",
        ha="right" if is_right else "left",
        size=9,
        color=color,
        weight="bold" if color == PLAN_COLOR else "normal",
        bbox={"facecolor": "#FFFFFFD0", "edgecolor": "none", "pad": 1.0},
        zorder=7,
    )

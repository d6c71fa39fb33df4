"""Plots of a step: live memory by category, and the peaks of plans against their added time."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fxmem.errors import UsageError
from fxmem.graph import Category, Operation, Phase
from fxmem.memory.liveness import list_category_bytes
from fxmem.report.categories import STYLES
from fxmem.report.document import build_document
from fxmem.report.tables import escape_controls, shorten
from fxmem.report.text import write_headline, write_subject
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fxmem.analysis import Analysis
    from fxmem.planning.plan import Plan

_COLUMNS = 200  # moments that are drawn at most; of those between, the one with the most bytes
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PALE, _PEAK, _PLAN, _FRONT = "#6B727C", "#B23A00", "#54206A", "#0B5A94"
_WIDEST_TITLE = 105
_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text, to be found and read aloud
    "svg.hashsalt": "fxmem",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": "fxmem"},
    "png": {"Software": "fxmem"},
    "pdf": {"CreationDate": None, "Creator": "fxmem", "Producer": None},
}


@contextlib.contextmanager
def plain_style() -> Iterator[None]:
    """Makes plots look alike whatever the user has set up."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font does not have
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


@plain_style()
def draw_timeline(
    analysis: Analysis, kind: str, plan: Plan | None = None, planned: Analysis | None = None
) -> bytes:
    """Draws the live memory of a step as stacked areas, with its phases and its peak.

    The peak of a plan is a line, and so is the step with the plan, where that is known. The file
    (``svg``, ``png`` or ``pdf``) is the same each time.
    """
    operations, peak, live = analysis.graph.operations, analysis.peak, analysis.profile.live_bytes
    steps, headline = len(operations), write_headline(build_document(analysis).headline)
    figure, axes, unit, unit_name = _start_figure(analysis, headline, title_pad=18)
    axes.set(xlim=(0, steps))
    axes.set(xlabel="operations of the step, in order", ylabel=f"live memory ({unit_name})")
    series = list_category_bytes(analysis.allocated_graph)
    present = [category for category in STYLES if any(series[category])] or [Category.PARAMETER]
    names = [each.value.replace("_", " ").lower() for each in present]
    moments = choose_moments(live, _COLUMNS)
    areas = axes.stackplot(
        np.linspace(0, steps, len(moments) + 1),
        [[series[each][at] / unit for at in (*moments, moments[-1])] for each in present],
        step="post",
        colors=[STYLES[each].light for each in present],
        # An SVG writes out each dot.
        hatch=[2 * STYLES[each].hatch.replace(".", "") for each in present],
        labels=[
            f"{name} {format_bytes(series[each][peak.step])}"
            for name, each in zip(names, present, strict=True)
        ],
        edgecolor="#16191D70",
        linewidth=0.3,
    )
    handles: list[Any] = [*reversed(areas)]
    starts = _list_phases(operations)
    for (phase, _), (start, stop) in zip(starts, pairwise([*starts.values(), steps]), strict=True):
        axes.axvline(start, color=_PALE, linewidth=0.8, linestyle=":")
        if (stop - start) / steps > 0.012 * len(phase.value):  # the name has room above it
            middle, above = (start + stop) / 2, axes.get_xaxis_transform()
            axes.text(middle, 1.01, phase.value, transform=above, ha="center", color=_PALE)
    if plan is not None:
        less = 1 - plan.peak_bytes / max(analysis.peak_bytes, 1)
        label = (
            f"with the plan {format_bytes(plan.peak_bytes)}\n"
            f"{less:.0%} less, {plan.overhead:.1%} more time"
        )
        level = plan.peak_bytes / unit
        handles.append(axes.axhline(level, color=_PLAN, linewidth=1.2, linestyle=":", label=label))
    if planned is not None:
        xs = fit_phases(planned.graph.operations, operations)
        live = planned.profile.live_bytes
        moments = choose_moments(live, _COLUMNS)
        ys = [live[at] / unit for at in moments]
        axes.plot([xs[at] for at in moments], ys, color=_PLAN, linewidth=1.7)
    x, y = peak.step + 0.5, peak.nbytes / unit
    axes.plot(x, y, marker="o", color=_PEAK, markersize=7, zorder=7, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(peak.nbytes)}",
        (x, y),
        xytext=(0, 6),
        textcoords="offset points",
        ha="left" if x < 0.2 * steps else "right" if x > 0.8 * steps else "center",
        color=_PEAK,
        weight="bold",
    )
    axes.legend(handles=handles, title="alive at the peak", loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, kind)


@plain_style()
def draw_tradeoff(
    analysis: Analysis, kind: str, front: Sequence[Plan], plan: Plan | None = None
) -> bytes:
    """Draws the peak of each plan of a front against the time that it adds."""
    if not front:
        raise UsageError("there are no trade-offs to draw", hint="front=fxmem.pareto(analysis)")
    peak = format_bytes(analysis.peak_bytes)
    chosen = plan or min(front, key=lambda p: (p.peak_bytes, p.overhead))
    figure, axes, unit, unit_name = _start_figure(
        analysis,
        f"Peak {peak}; {'with the plan' if plan else 'down to'} "
        f"{format_bytes(chosen.peak_bytes)} for {chosen.overhead:.1%} more time",
    )
    most = max(*(p.overhead for p in (*front, chosen)), 0.01)
    axes.set(xlim=(-0.03 * most, 1.08 * most), ylabel=f"peak ({unit_name})")
    axes.set(xlabel="time added to the step, by the target's roofline")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.7)
    ordered = sorted(front, key=lambda p: (p.overhead, -p.peak_bytes))
    xs = [*(p.overhead for p in ordered), 1.08 * most]
    ys = [p.peak_bytes / unit for p in (*ordered, ordered[-1])]
    level, label = analysis.peak_bytes / unit, f"without a plan {peak}"
    axes.axhline(level, label=label, color=_PEAK, linestyle="--", linewidth=1.0)
    axes.fill_between(xs, ys, step="post", color="#DCEAF7")
    axes.plot(xs, ys, drawstyle="steps-post", color=_FRONT, linewidth=1.2)
    axes.plot(xs[:-1], ys[:-1], "o", color=_FRONT, label=f"{len(front)} plans")
    if plan is not None:
        label = f"chosen {format_bytes(plan.peak_bytes)}, {plan.overhead:.1%} more time"
        at = plan.overhead, plan.peak_bytes / unit
        axes.plot(*at, "D", color=_PLAN, markersize=9, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, kind)


def choose_moments(live_bytes: Sequence[int], columns: int) -> tuple[int, ...]:
    """Chooses operations that stand for all: of consecutive ones, that with the most bytes.

    >>> choose_moments((1, 5, 2, 2), 2), choose_moments((1, 2), 4)
    ((1, 2), (0, 1))
    """
    steps = len(live_bytes)
    columns = min(columns, steps)
    edges = [column * steps // columns for column in range(columns + 1)]
    return tuple(
        max(range(start, stop), key=live_bytes.__getitem__) for start, stop in pairwise(edges)
    )


def fit_phases(operations: Sequence[Operation], others: Sequence[Operation]) -> tuple[float, ...]:
    """Places operations on the axis of others, so that each phase begins where theirs does.

    >>> step = [Operation(0, "a", Phase.FORWARD), Operation(1, "b", Phase.BACKWARD)]
    >>> fit_phases([*step, Operation(2, "c", Phase.BACKWARD)], step)
    (0.5, 1.25, 1.75)
    """
    starts, there = _list_phases(operations), _list_phases(others)
    shared = [key for key in starts if key in there]
    ours = [*(starts[key] for key in shared), len(operations)]
    theirs = [*(there[key] for key in shared), len(others)]
    return tuple(np.interp(np.arange(len(operations)) + 0.5, ours, theirs).tolist())


def _list_phases(operations: Sequence[Operation]) -> dict[tuple[Phase, int], int]:
    """Lists where each run of operations of one phase starts, by phase and occurrence."""
    seen, starts = Counter[Phase](), dict[tuple[Phase, int], int]()
    for phase, group in groupby(operations, key=lambda operation: operation.phase):
        starts[phase, seen[phase]] = next(group).index
        seen[phase] += 1
    return starts


def _start_figure(
    analysis: Analysis, answer: str, title_pad: int = 6
) -> tuple[Figure, Axes, int, str]:
    """Makes a figure titled with the answer, whose heights are in a unit of short numbers."""
    from matplotlib.figure import Figure

    model = analysis.setup.model
    rest = write_subject(analysis.setup).removeprefix(f"{model}; ")
    lines = [shorten(escape_controls(line), _WIDEST_TITLE) for line in (model, answer, rest)]
    figure = Figure(figsize=(10.0, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title("\n".join(lines), pad=title_pad)
    power = min(max(analysis.peak_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    axes.set(ylim=(0, max(analysis.peak_bytes, 1) / 1024**power * 1.12))
    return figure, axes, 1024**power, _UNITS[power]


def _save(figure: Figure, kind: str) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=150, metadata=_METADATA[kind])
    return drawn.getvalue()
